"""The reader of code objects sees what a kernel was made to have: registers, LDS, spills, scratch, instructions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kdagen import isa, toolchain
from kdagen.errors import ToolchainError
from kdagen.target import CDNA

ARCH = "gfx942"
# 128 values that are all live at once, in kernels that may have 256 and 64 registers (of a SIMD's 512: 2 and 8 waves).
KERNELS = """
#include <hip/hip_runtime_api.h>
#if !defined(__global__)
#define __global__ __attribute__((global))
#endif
#define THREADS(n) __attribute__((amdgpu_flat_work_group_size(n, n)))
#define WAVES(n) __attribute__((amdgpu_waves_per_eu(n, n)))

template <int kCount>
static __attribute__((device, always_inline)) void keep_all(float *a) {
    float value[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        value[i] = a[i * 64 + __builtin_amdgcn_workitem_id_x()];
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        asm volatile("" : "+v"(value[i]));
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        a[i * 64 + __builtin_amdgcn_workitem_id_x()] = value[i] * value[kCount - 1 - i];
}
extern "C" __global__ THREADS(256) WAVES(2) void roomy(float *a) { keep_all<128>(a); }
extern "C" __global__ THREADS(64) WAVES(8) void spilling(float *a) { keep_all<128>(a); }
extern "C" __global__ THREADS(64) void accumulating(float *a) {
    float value = a[__builtin_amdgcn_workitem_id_x()];
    asm volatile("v_accvgpr_write_b32 a40, %0" ::"v"(value) : "a40");
}
extern "C" __global__ THREADS(128) void permuting(int *a) {
    __attribute__((shared)) static int words[300];
    const int lane = __builtin_amdgcn_workitem_id_x();
    words[lane] = a[lane];
    __builtin_amdgcn_s_barrier();
    a[lane] = __builtin_amdgcn_ds_bpermute(words[127 - lane] * 4, lane);
}
"""


@pytest.fixture(scope="module")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler("hip", [ARCH])
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def code_object(compiler, tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("isa") / "kernels.hip"
    source.write_text(KERNELS)
    return toolchain.compile_device(compiler, ARCH, source, source.with_suffix(".co"), CDNA.flags)


def test_each_kernel_has_what_it_was_made_to_have(code_object):
    kernels = isa.read_metadata(code_object)
    assert {name: kernel.workgroup_threads for name, kernel in kernels.items()} == {
        "roomy": 256,
        "spilling": 64,
        "accumulating": 64,
        "permuting": 128,
    }
    assert {name: kernel.lds_bytes for name, kernel in kernels.items()} == {
        "roomy": 0,
        "spilling": 0,
        "accumulating": 0,
        "permuting": 300 * 4,
    }
    assert all(kernels[name].name == name and kernels[name].sgprs > 0 for name in kernels)


def test_spills_are_counted(code_object):
    kernels = isa.read_metadata(code_object)
    roomy, spilling = kernels["roomy"], kernels["spilling"]
    assert 128 <= roomy.vgprs <= 256
    assert (roomy.vgpr_spills, roomy.scratch_bytes) == (0, 0)
    assert spilling.vgprs <= 64
    # A spilled register takes four bytes of scratch, unless it went to an accumulator register.
    assert spilling.vgpr_spills >= 64
    assert spilling.scratch_bytes + 4 * spilling.agprs >= 4 * 64
    code = isa.disassemble(code_object)
    moved = ("scratch_store", "v_accvgpr_write", "buffer_store")
    assert any(line.startswith(moved) for line in code["spilling"])
    assert not any(line.startswith(moved) for line in code["roomy"])


def test_accumulator_registers_are_counted_among_the_vector_registers(code_object):
    kernel = isa.read_metadata(code_object)["accumulating"]
    assert kernel.agprs == 41
    assert 41 < kernel.vgprs <= 41 + 8


def test_instructions_are_without_addresses_and_encodings(code_object):
    code = isa.disassemble(code_object)
    assert set(code) == {"roomy", "spilling", "accumulating", "permuting"}
    for lines in code.values():
        assert "s_endpgm" in lines
        assert all(line[0].isalpha() and "//" not in line and line == " ".join(line.split()) for line in lines)
    assert sum(line.startswith("ds_bpermute_b32 v") for line in code["permuting"]) == 1
    assert not any("bpermute" in line for line in code["roomy"])


def test_a_library_names_the_architectures_in_it(compiler, tmp_path):
    source, library = tmp_path / "kernels.hip", tmp_path / "library.so"
    source.write_text(KERNELS)

    def link(*flags: str) -> Path:
        archs = [f"--offload-arch={arch}" for arch in (ARCH, "gfx90a")]
        # -nogpulib: no device libraries are needed. The stubs of the host are linked against no runtime.
        command = [*compiler.command, *archs, "-nogpulib", "-nogpuinc", "-fPIC", "-shared", "-nostdlib", *flags]
        done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return library

    assert isa.offload_archs(link()) == ("gfx90a", "gfx942")
    message = "expected plain offload bundles in .hip_fatbin, got none; is it compressed?"
    with pytest.raises(ToolchainError, match=message):
        isa.offload_archs(link("--offload-compress"))


def test_what_is_no_hip_library_is_refused(tmp_path):
    text = tmp_path / "file"
    text.write_text("text")
    with pytest.raises(ToolchainError, match="expected a HIP library, got a file that is not ELF"):
        isa.offload_archs(text)
    with pytest.raises(ToolchainError, match=r"expected a HIP library, got one without \.hip_fatbin"):
        isa.offload_archs(Path("/proc/self/exe"))
