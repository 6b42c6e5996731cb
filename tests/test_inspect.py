"""`kdagen inspect`: tables, JSON, the source with its stages, a difference, the cache, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen import inspect_code, inspect_report, inspect_source, isa, paths, toolchain
from kdagen.cli import main
from kdagen.spec import INSTANCES
from kdagen.target import CDNA
from tests.harness import ABSENT
from tests.profiles import ARCH, VARIANT, compiler

ONE = ["inspect", "--heads", "12", "--arch", ARCH]
ROUNDING = "  return o * f32x2{inverse_rms, inverse_rms} * gates.norm_weight"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A git repository with the source of 12 heads, committed as it is and then changed on the disk."""
    compiler()
    folder = tmp_path / "generated"
    folder.mkdir()
    text = inspect_code.committed_text(VARIANT)
    monkeypatch.setattr(inspect_code, "generated_dir", lambda: folder)
    path = folder / VARIANT.file_name
    path.write_text(text)
    names = ["-c", "user.name=test", "-c", "user.email=test@test"]
    for command in (["init", "-q"], ["add", "."], [*names, "commit", "-qm", "before"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert ROUNDING in text
    path.write_text(text.replace(ROUNDING, ROUNDING.replace(" * gates.norm_weight", " / gates.norm_weight")))
    return tmp_path


def test_the_table_has_every_instance_and_the_audit_is_clean(capsys, tmp_path):
    compiler()
    assert main([*ONE, "--json", str(tmp_path / "all.json")]) == 0
    output = capsys.readouterr().out
    for instance in INSTANCES:
        assert len(re.findall(rf"^kda_decode_h12_cdna +{instance.name} +gfx942 ", output, re.MULTILINE)) == 3
    assert "global load 16 nt" in output and "mca cycles" in output and "waits in rec." in output
    assert re.search(r"^audit: 16 rules on 8 instances: none broken \(.*clang.*\)$", output, re.MULTILINE)

    written = json.loads((tmp_path / "all.json").read_text())
    assert "clang" in written["compiler"] and written["broken"] == []
    row = written["instances"][0]
    assert (row["variant"], row["instance"], row["arch"]) == ("kda_decode_h12_cdna", "bounded-norm-sd", "gfx942")
    assert row["state_bytes_in_flight_per_cu"] == row["workgroups_per_cu"] * 64 * 1024 == 256 * 1024
    assert (row["spills"], row["scratch_bytes"], row["state_loads_before_wait"]) == (0, 0, 16)
    assert sum(row["classes"].values()) == row["instructions"]
    assert sum(row["memory"].values()) == row["classes"]["vector memory"]
    assert 1000 < row["cycles"] < 2000 and 4 * row["instructions"] < row["code_bytes"]


def test_a_second_run_compiles_nothing_and_says_the_same(capsys, monkeypatch):
    compiler()
    assert main(ONE) == 0
    first = capsys.readouterr().out

    def refuse(*arguments, **named):
        raise AssertionError("compiled again")

    monkeypatch.setattr(toolchain, "compile_device", refuse)
    assert main(ONE) == 0
    assert capsys.readouterr().out == first


def test_a_damaged_cache_is_made_anew(capsys):
    compiler()
    assert main(ONE) == 0
    first = capsys.readouterr().out
    kept, *_ = paths.cache_dir("inspect").glob("*.json.gz")
    for damage in (b"", b"{", kept.read_bytes()[:200]):
        for path in paths.cache_dir("inspect").glob("*.json.gz"):
            path.write_bytes(damage)
        assert main(ONE) == 0
        assert capsys.readouterr().out == first


def test_one_instance_on_two_architectures(capsys):
    compiler()
    assert main(["inspect", "--heads", "12", "--arch", "gfx90a,gfx950", "--instance", "softplus-nonorm-ds"]) == 0
    output = capsys.readouterr().out
    assert "audit: 16 rules on 2 instances: none broken" in output
    assert "global load 16 glc slc" in output and "global load 16 nt" in output


def test_a_difference_shows_what_changed_and_a_broken_rule_is_exit_1(capsys, repository, tmp_path):
    assert main([*ONE, "--diff", "HEAD", "--json", str(tmp_path / "diff.json")]) == 1
    captured = capsys.readouterr()
    changed = re.search(
        r"^kda_decode_h12_cdna +bounded-norm-sd +gfx942 +instructions +(\d+) +(\d+) +\+(\d+)$", captured.out, re.M
    )
    before, after, more = map(int, changed.groups())
    assert after - before == more > 0
    assert "nonorm" not in captured.out  # the norm is not in them
    assert re.search(
        r"^kda_decode_h12_cdna bounded-norm-sd gfx942: no-ieee-division: expected .*, got: v_div_scale_f32 ",
        captured.out,
        re.MULTILINE,
    )
    assert re.search(r"audit: 16 rules on 8 instances: \d+ broken \(", captured.out)
    written = json.loads((tmp_path / "diff.json").read_text())
    assert written["changes_since"]["revision"] == "HEAD"
    assert ["kda_decode_h12_cdna", "bounded-norm-sd", "gfx942", "instructions", before, after] in written[
        "changes_since"
    ]["changes"]
    assert {broken["rule"] for broken in written["broken"]} >= {"no-ieee-division"}


def test_no_difference_is_said(capsys, repository):
    subprocess.run(["git", "-C", str(repository), "checkout", "-q", "."], check=True)
    assert main([*ONE, "--diff", "HEAD"]) == 0
    assert capsys.readouterr().out.startswith("no figure differs from HEAD\naudit: ")


def test_a_figure_that_one_side_lacks_is_compared_with_0():
    from tests.profiles import written

    before, after = written("s_nop 0"), written("s_nop 0", "global_load_dword v0, v1, s[0:1]")
    changes = inspect_report.difference([before], [after])
    assert ("by_hand", "bounded-norm-sd", "gfx942", "memory global load 4", 0, 1) in changes
    assert ("by_hand", "bounded-norm-sd", "gfx942", "memory global load 4", 1, 0) in inspect_report.difference(
        [after], [before]
    )


def test_the_source_is_marked_with_its_stages(capsys):
    compiler()
    assert main([*ONE, "--source"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("; kda_decode_h12_cdna bounded-norm-sd gfx942, ")
    blocks = re.split(r"^; ---- (.+)$", output, flags=re.MULTILINE)
    stages: dict[str, str] = {}
    for name, lines in zip(blocks[1::2], blocks[2::2], strict=True):
        stages[name] = stages.get(name, "") + lines
    assert set(stages) == {
        "the kernel itself",
        "stage 1: causal conv1d update and SiLU",
        "stage 2: decay gate and delta rule",
        "stage 3: gated output RMSNorm",
    }
    state = ("global_load_dwordx4", "global_store_dwordx4")
    for name, lines in stages.items():
        assert [lines.count(access) for access in state] == ([16, 16] if name.startswith("stage 2") else [0, 0])
    assert stages["the kernel itself"].count("s_barrier") == 2
    assert "const int slot = *slot_of(p, work.row);" in output
    assert "; ----" in output and re.search(r"^L\d+:$", output, re.MULTILINE)


def test_naming_lines_changes_no_instruction(tmp_path):
    source = paths.generated_dir() / VARIANT.file_name
    plain, named = (
        isa.disassemble(toolchain.compile_device(compiler(), ARCH, source, tmp_path / f"{name}.co", flags))
        for name, flags in (("plain", CDNA.flags), ("named", (*CDNA.flags, inspect_source.LINES)))
    )
    assert len(plain) == len(INSTANCES) and named == plain


def test_an_instruction_belongs_to_the_innermost_call_that_is_in_a_stage():
    text = "// ---- primitives ----\nA\n// ---- stage 1: conv ----\nB\n// ---- stage 2: rule ----\nC\nKERNEL void k() {"
    where = inspect_source.sections(text)
    assert inspect_source.stage_of((2, 4, 6, 7), where) == ("stage 1: conv", 4)
    assert inspect_source.stage_of((2, 7), where) == ("the kernel itself", 7)
    assert inspect_source.stage_of((0,), where) == inspect_source.stage_of((), where) == ("the kernel itself", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", str(ABSENT)], rf"--heads: expected some of 4, 6, 8, 12, .*96, got {ABSENT}"),
        (["--arch", "gfx1100"], r"--arch: expected some of gfx90a, gfx942, gfx950, got 'gfx1100'"),
        (["--instance", "norm"], r"--instance: expected one of bounded-norm-sd, .*, got 'norm'"),
        (["--source"], r"--source: expected one head count, got none; add `--heads 12`"),
        (["--source", "--heads", "12"], r"--source: expected one architecture, got none; add `--arch gfx942`"),
        (
            ["--source", "--heads", "12,24", "--arch", "gfx942"],
            r"--source: expected one head count, got 12, 24; add .*",
        ),
        (["--source", "--heads", "12", "--json", "f"], r"--json: expected none with --source, got f"),
        (
            ["--diff", "no-such-revision"],
            r"--diff: expected a revision of the git repository of .*, got 'no-such-revision'",
        ),
        (["--diff", "--all"], None),
    ],
)
def test_a_wrong_request_exits_2(capsys, arguments, message):
    if message is None:
        with pytest.raises(SystemExit) as raised:
            main(["inspect", *arguments])
        assert raised.value.code == 2
        return
    assert main(["inspect", *arguments]) == 2
    assert re.fullmatch(f"kdagen: {message}\n", capsys.readouterr().err)


def test_a_revision_without_the_file_is_refused(capsys, repository):
    assert main(["inspect", "--heads", "24", "--diff", "HEAD"]) == 2
    expected = "--diff: expected kda_decode_h24_cdna.hip at HEAD, found none; choose others with --heads"
    assert capsys.readouterr().err == f"kdagen: {expected}\n"


def test_a_source_that_is_not_there_is_refused(capsys, repository):
    assert main(["inspect", "--heads", "24"]) == 2
    assert (
        "kda_decode_h24_cdna.hip: expected a generated source, found none; run `kdagen build`"
        in capsys.readouterr().err
    )


def test_a_json_file_that_cannot_be_written_is_refused(capsys, tmp_path):
    compiler()
    assert main([*ONE, "--json", str(tmp_path / "none" / "f.json")]) == 2
    assert re.fullmatch(
        r"kdagen: --json: expected a file to write, got '.*f.json': No such.*\n", capsys.readouterr().err
    )


def test_missing_readers_are_named(capsys, monkeypatch, tmp_path):
    compiler()
    monkeypatch.setenv("KDAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "msgpack", None)
    assert main(ONE) == 1
    assert "expected pyelftools and msgpack to read a code object" in capsys.readouterr().err


def test_a_source_that_does_not_compile_is_an_error_with_a_log(capsys, repository):
    path = repository / "generated" / VARIANT.file_name
    path.write_text(path.read_text().replace("kHeads = 12;", "kHeads = twelve;"))
    assert main(ONE) == 1
    error = capsys.readouterr().err
    log = re.search(r"to succeed, got: .*undeclared identifier 'twelve' \(all of it in (.*\.log)\)\n$", error)
    assert log and "twelve" in Path(log[1]).read_text()
