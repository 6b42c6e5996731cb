import subprocess

import pytest

from kdagen import emit
from kdagen.emit import DriftKind
from kdagen.paths import generated_dir

TEXTS = {"a.hip": f"// a.hip: {emit.MARK}\nint a;\n", "b.hip": f"// b.hip: {emit.MARK}\nint b;\n"}


def kinds(folder):
    return {drift.name: drift.kind for drift in emit.check(folder, TEXTS)}


def test_the_committed_sources_are_what_the_table_gives():
    assert emit.check(generated_dir(), emit.render_all()) == []


def test_only_what_changed_is_written_and_orphans_go_last(tmp_path):
    assert emit.write(tmp_path, TEXTS, remove_orphans=True).changed == ("a.hip", "b.hip")
    untouched = (tmp_path / "b.hip").stat().st_mtime_ns
    (tmp_path / "a.hip").write_text("edited")
    (tmp_path / "old.hip").write_text(f"// old.hip: {emit.MARK}\n")
    (tmp_path / "notes.txt").write_text("mine")
    done = emit.write(tmp_path, TEXTS, remove_orphans=True)
    assert done == emit.Written(changed=("a.hip",), unchanged=("b.hip",), removed=("old.hip",))
    assert (tmp_path / "b.hip").stat().st_mtime_ns == untouched
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_of_the_users_own_keeps_its_files(tmp_path):
    (tmp_path / "old.hip").write_text(f"// old.hip: {emit.MARK}\n")
    assert emit.write(tmp_path, TEXTS, remove_orphans=False).removed == ()
    assert (tmp_path / "old.hip").exists()


def test_check_finds_every_kind_of_drift(tmp_path):
    emit.write(tmp_path, TEXTS, remove_orphans=True)
    assert kinds(tmp_path) == {}
    (tmp_path / "a.hip").write_text(f"// a.hip: {emit.MARK}\nint A;\n")
    (tmp_path / "b.hip").unlink()
    (tmp_path / "old.hip").write_text(f"// old.hip: {emit.MARK}\n")
    (tmp_path / "notes.txt").write_text("mine")
    assert kinds(tmp_path) == {
        "a.hip": DriftKind.CHANGED,
        "b.hip": DriftKind.MISSING,
        "notes.txt": DriftKind.STRAY,
        "old.hip": DriftKind.ORPHANED,
    }
    (changed,) = [drift for drift in emit.check(tmp_path, TEXTS) if drift.kind is DriftKind.CHANGED]
    assert "-int A;\n+int a;\n" in changed.diff


def test_a_carriage_return_or_a_missing_newline_is_drift(tmp_path):
    emit.write(tmp_path, TEXTS, remove_orphans=True)
    (tmp_path / "a.hip").write_bytes(TEXTS["a.hip"].replace("\n", "\r\n").encode())
    (tmp_path / "b.hip").write_bytes(TEXTS["b.hip"].rstrip("\n").encode())
    assert kinds(tmp_path) == {"a.hip": DriftKind.CHANGED, "b.hip": DriftKind.CHANGED}


def test_a_file_that_git_does_not_know_is_drift(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = tmp_path / "generated"
    emit.write(folder, TEXTS, remove_orphans=True)
    assert kinds(folder) == {"a.hip": DriftKind.UNTRACKED, "b.hip": DriftKind.UNTRACKED}
    subprocess.run(["git", "-C", str(folder), "add", "a.hip"], check=True)
    assert kinds(folder) == {"b.hip": DriftKind.UNTRACKED}


@pytest.mark.parametrize("name", ["a.hip", "b.hip"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, name):
    emit.write(tmp_path, TEXTS, remove_orphans=True)
    (tmp_path / name).write_text("old")
    monkeypatch.setattr(emit.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        emit.write(tmp_path, TEXTS, remove_orphans=True)
    assert (tmp_path / name).read_text() == "old"
