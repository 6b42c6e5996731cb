"""The report of `kdagen verify`: what passes, what fails, and how a failure is run again."""

import json
import shlex

import pytest

from kdagen.cli import main
from kdagen.render import render
from tests.harness import cdna_variant


@pytest.fixture
def mutated(tmp_path):
    path = tmp_path / "mutated.hip"
    text = render(cdna_variant(4))
    path.write_text(text.replace("sigmoid(beta_logit)", "beta_logit", 1))
    return path


def test_a_passing_kernel_prints_its_row_and_exits_0(capsys):
    assert main(["verify", "--heads", "4", "--quick"]) == 0
    output = capsys.readouterr().out
    header, row = output.splitlines()[:2]
    assert header.split() == "variant cases failed state error output ulps conv words races seconds".split()
    assert row.split()[:3] == ["kda_decode_h4_cdna", "8", "0"]
    assert "8 cases on 1 kernels: none failed" in output


def test_a_failure_exits_1_with_a_command_that_fails_the_same_way(capsys, mutated):
    assert main(["verify", "--heads", "4", "--quick", "--source", str(mutated)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith("wrong state: error") for line in lines)
    command = shlex.split(lines[-1])
    assert command[:2] == ["kdagen", "verify"]
    assert main(command[1:]) == 1
    again = capsys.readouterr().out
    assert "1 cases failed" in again and "wrong state: error" in again


def test_json_has_every_case(capsys, tmp_path):
    path = tmp_path / "report.json"
    assert main(["verify", "--heads", "4", "--quick", "--json", str(path)]) == 0
    (variant,) = json.loads(path.read_text())["variants"]
    assert variant["variant"] == "kda_decode_h4_cdna"
    assert len(variant["cases"]) == 8
    assert all(case["symptoms"] == [] and case["state_error"] < 2e-6 for case in variant["cases"])


def test_a_head_count_outside_the_table_is_verified_too(capsys):
    assert main(["verify", "--heads", "3", "--quick"]) == 0
    assert "kda_decode_h3_cdna" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nonsense"], "kdagen: case: expected a token such as h12-b3-"),
        (
            ["--heads", "8", "--case", "h4-b1-bounded-norm-sd-bias-live-dense-unit-f1-s0"],
            "kdagen: --case: expected a case",
        ),
        (["--source", "x.hip"], "kdagen: --source: expected one head count with it, got "),
        (["--heads", "4", "--source", "no.hip"], "kdagen: --source: expected a file, got 'no.hip'"),
    ],
)
def test_a_wrong_request_exits_2_in_one_line(capsys, arguments, message):
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_source_that_does_not_compile_exits_1_with_the_compilers_line(capsys, tmp_path):
    path = tmp_path / "broken.hip"
    path.write_text("this is not C++\n")
    assert main(["verify", "--heads", "4", "--quick", "--source", str(path)]) == 1
    error = capsys.readouterr().err
    assert "kdagen: expected " in error and "broken.hip:1:1: error:" in error and ".log)" in error
