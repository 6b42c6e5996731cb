import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdagen import emit
from kdagen.cli import main
from kdagen.variants import VARIANTS
from tests.harness import ABSENT


def test_build_check_passes_on_the_committed_tree(capsys):
    assert main(["build", "--check"]) == 0
    assert f"{len(emit.render_all())} files in" in capsys.readouterr().out


def test_check_prints_a_diff_and_ends_with_the_command_that_repairs_it(capsys, tmp_path):
    out = ["--heads", f"{ABSENT},{ABSENT + 1}", "--out", str(tmp_path)]
    assert main(["build", *out]) == 0
    assert main(["build", "--check", *out]) == 0
    path = tmp_path / f"kda_decode_h{ABSENT}_cdna.hip"
    path.write_text(path.read_text().replace(f"kHeads = {ABSENT}", "kHeads = 7"))
    capsys.readouterr()
    assert main(["build", "--check", *out]) == 1
    captured = capsys.readouterr()
    assert f"-constexpr int kHeads = 7;\n+constexpr int kHeads = {ABSENT};" in captured.out
    assert captured.err.endswith(f"run `kdagen build --heads {ABSENT},{ABSENT + 1} --out {tmp_path}`\n")
    assert main(["build", *out]) == 0
    assert main(["build", "--check", *out]) == 0


def test_build_writes_only_what_changed(capsys, tmp_path):
    assert main(["build", "--heads", str(ABSENT), "--out", str(tmp_path)]) == 0
    assert "2 files: 2 written, 0 up to date" in capsys.readouterr().out
    assert main(["build", "--heads", str(ABSENT), "--out", str(tmp_path)]) == 0
    assert "2 files: 0 written, 2 up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["build", "--heads", str(ABSENT)],
            "kdagen: --out: expected a folder with --heads, got none; add `--out DIR`\n",
        ),
        (["build", "--heads", "0", "--out", "x"], "kdagen: num_heads: expected an int from 1 to 1024, got 0\n"),
    ],
)
def test_a_wrong_request_exits_2(capsys, arguments, message):
    assert main(arguments) == 2
    assert capsys.readouterr().err == message


def test_a_word_in_place_of_a_head_count_is_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["verify", "--heads", "twelve"])
    assert raised.value.code == 2
    assert "expected counts such as 12 or 12,24, got 'twelve'" in capsys.readouterr().err


def test_list_names_every_variant_with_its_launch_shape(capsys):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for variant in VARIANTS:
        assert variant.name in output and variant.reason in output
    assert "rows*12 x 256" in output and "bounded-norm-sd" in output


def test_python_m_is_the_same_and_a_closed_pipe_is_no_traceback():
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = f"{sys.executable} -m kdagen list | head -1"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("variant") and done.stderr == ""


@pytest.mark.parametrize("command", [[], ["build"], ["list"], ["verify"], ["inspect"], ["bench"], ["doctor"]])
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as raised:
        main([*command, "--help"])
    assert raised.value.code == 0
    assert len(capsys.readouterr().out) > 200 or command in (["list"], ["doctor"])
