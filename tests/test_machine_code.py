"""Every generated file compiled for gfx942 and gfx950 with warnings as errors, and what its machine code is made of."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kdagen import isa, toolchain
from kdagen.errors import BuildError, ToolchainError
from kdagen.paths import generated_dir
from kdagen.spec import INSTANCES
from kdagen.target import CDNA, CUDA
from kdagen.variants import of_target

# Reductions: three in the prologue and two in each of eight rows, four adds each; four more for the output norm.
ROW_SUM_ADDS = 4 * (3 + 2 * 8)
NORM_ADDS = 4
FLAGS = (*CDNA.flags, "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler("hip", CDNA.archs)
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", CDNA.archs)
@pytest.mark.parametrize("variant", of_target(CDNA), ids=lambda v: v.name)
def test_machine_code(variant, arch, compiler, tmp_path):
    source = generated_dir() / variant.file_name
    code_object = toolchain.compile_device(compiler, arch, source, tmp_path / "kernel.co", FLAGS)
    metadata, code = isa.read_metadata(code_object), isa.disassemble(code_object)
    assert len(metadata) == len(INSTANCES)
    for name, kernel in metadata.items():
        assert kernel.vgprs + kernel.agprs <= variant.plan.max_vgprs == 128
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
        assert kernel.lds_bytes == variant.plan.lds_bytes
        assert kernel.workgroup_threads == variant.plan.threads

        lines = code[name]
        assert not [
            line for line in lines if re.match(r"ds_bpermute|ds_permute|ds_swizzle|scratch_|flat_|buffer_", line)
        ]
        assert sum(line.startswith("s_barrier") for line in lines) == 2
        norm = name.startswith(tuple(f"_Z{len(variant.name)}{variant.name}ILb{gate}ELb1E" for gate in (0, 1)))
        dpp = [line for line in lines if re.search(r"\b(quad_perm|row_)", line)]
        assert len(dpp) == ROW_SUM_ADDS + (NORM_ADDS if norm else 0)
        assert all(line.startswith("v_add_f32_dpp") for line in dpp), "a DPP move that was not folded into its add"

        state = [line for line in lines if line.startswith(("global_load_dwordx4", "global_store_dwordx4"))]
        assert len(state) == 2 * variant.plan.rows_per_lane * variant.plan.parts
        streams = " nt" if arch != "gfx90a" else " slc"
        assert all(line.endswith(streams) or f"{streams} " in line for line in state)
        loads = [i for i, line in enumerate(lines) if line.startswith("global_load_dwordx4")]
        waits = [i for i, line in enumerate(lines) if line.startswith("s_waitcnt") and "vmcnt" in line]
        assert not [wait for wait in waits if loads[0] < wait < loads[-1]], "the slice is not in flight as a whole"


@pytest.mark.parametrize("variant", of_target(CUDA), ids=lambda v: v.name)
def test_nvcc_compiles_the_same_stages_without_a_gpu(variant, tmp_path):
    try:
        nvcc = toolchain.find_compiler("cuda", CUDA.archs)
    except ToolchainError as error:
        pytest.skip(str(error))
    source = generated_dir() / variant.file_name
    flags = (*CUDA.flags, "-Werror=all-warnings", "-Xptxas=-v")
    command = toolchain.compile_command(nvcc, CUDA.archs[0], source, tmp_path / "kernel.cubin")
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(INSTANCES)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(registers) == len(INSTANCES) and max(registers) <= variant.plan.max_vgprs


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
