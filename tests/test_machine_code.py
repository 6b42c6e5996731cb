"""The audit's gate: every generated file compiled for every AMD architecture, warnings as errors, no rule broken."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kdagen import inspect_code, isa, toolchain
from kdagen.audit import BUDGETS, RULES, audit_all
from kdagen.errors import BuildError, ToolchainError
from kdagen.machine_code import class_of
from kdagen.paths import generated_dir
from kdagen.render import render
from kdagen.spec import INSTANCES, KernelSpec, OutputNorm
from kdagen.target import CDNA, CUDA
from kdagen.tuning import Band, Tuning
from kdagen.variants import Variant, of_target

FLAGS = (*CDNA.flags, "-Wall", "-Wextra", "-Werror")
# Adds over the 16 lanes of a row: four for each of the norms of q and k and for k.q, eight for either dot product of
# eight rows at once, four for the sum of squares. Beside them a broadcast for each row.
DPP = 4 * 3 + 2 * (4 + 2 + 1 + 1) + 4 + 8
NORM_DPP = 4


@pytest.fixture(scope="module")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler("hip", CDNA.archs)
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", CDNA.archs)
@pytest.mark.parametrize("variant", of_target(CDNA), ids=lambda v: v.name)
def test_no_instance_breaks_a_rule(variant, arch, compiler):
    job = inspect_code.Job(variant, arch, inspect_code.committed_text(variant))
    profiles = inspect_code.profile(compiler, job, FLAGS)
    assert [profile.instance for profile in profiles] == [instance.name for instance in INSTANCES]
    assert [str(broken) for broken in audit_all(profiles)] == []
    for profile, instance in zip(profiles, INSTANCES, strict=True):
        assert profile.vgprs <= variant.plan.max_vgprs
        assert profile.lds_bytes == variant.plan.lds_bytes
        assert profile.workgroup_threads == variant.plan.threads
        accesses = variant.plan.rows_per_lane * variant.plan.parts
        assert profile.state_accesses == profile.state_loads_before_wait == accesses
        wide = {kind: count for kind, count in profile.memory.items() if " 16" in kind}
        policy = "glc slc" if arch == "gfx90a" else "nt"
        assert wide == {f"global load 16 {policy}": accesses, f"global store 16 {policy}": accesses}
        assert profile.classes["DPP"] == DPP + (NORM_DPP if instance.output_norm is OutputNorm.GATED else 0)
        assert profile.classes["barrier"] == 2
        assert sum(profile.classes.values()) == len(profile.lines)
        assert "other" not in map(class_of, profile.lines)


def test_the_audit_has_a_budget_for_every_instance_and_architecture():
    assert set(BUDGETS) == set(CDNA.archs)
    assert all(set(rows) == {instance.name for instance in INSTANCES} for rows in BUDGETS.values())
    assert len({rule.name for rule in RULES}) == len(RULES)


def compile_by_nvcc(variant, source, folder):
    try:
        nvcc = toolchain.find_compiler("cuda", CUDA.archs)
    except ToolchainError as error:
        pytest.skip(str(error))
    flags = (*CUDA.flags, "-Werror=all-warnings", "-Xptxas=-v")
    command = toolchain.compile_command(nvcc, CUDA.archs[0], source, folder / "kernel.cubin")
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(INSTANCES)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(registers) == len(INSTANCES) and max(registers) <= variant.plan.max_vgprs


@pytest.mark.parametrize("variant", of_target(CUDA), ids=lambda v: v.name)
def test_nvcc_compiles_the_same_stages_without_a_gpu(variant, tmp_path):
    compile_by_nvcc(variant, generated_dir() / variant.file_name, tmp_path)


@pytest.mark.parametrize("team", [2, 4, 8])
def test_a_team_whose_slices_wait_in_registers_compiles_though_no_band_has_one(team, tmp_path):
    variant = Variant(KernelSpec(12), CUDA, "a test", Band(None, Tuning(workgroups_per_head=team), "a test"))
    source = tmp_path / variant.file_name
    source.write_text(render(variant))
    compile_by_nvcc(variant, source, tmp_path)


def test_a_warning_is_an_error_with_command_line_and_log(compiler, tmp_path):
    source = tmp_path / "bad.hip"
    source.write_text("static int unused() { return 1; }\n")
    with pytest.raises(
        BuildError, match=r"expected .* to succeed, got: .*unused function.* \(all of it in .*bad.log\)"
    ):
        toolchain.compile_device(compiler, "gfx942", source, tmp_path / "bad.co", FLAGS)


def test_a_file_that_is_not_elf_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"not ELF")
    with pytest.raises(ToolchainError, match="expected an AMDGPU code object, got a file that is not ELF"):
        isa.read_metadata(path)
    with pytest.raises(ToolchainError, match=r"expected .*llvm-objdump.* to read .*file, got"):
        isa.disassemble(path)


def test_a_program_of_the_host_is_refused():
    with pytest.raises(ToolchainError, match="expected an AMDGPU code object, got an ELF file without AMDGPU metadata"):
        isa.read_metadata(Path("/proc/self/exe"))
