"""What the emulator finds, each on the smallest kernel that does it, beside a twin that does not."""

from __future__ import annotations

import ctypes
import math
import struct
import subprocess
import sys

import pytest
import torch

from kdagen import emulator
from kdagen.emulator import EmulatedKernel, EmulatorOptions, FaultKind, Interval
from kdagen.errors import BuildError, EmulatorError, ToolchainError


class Params(ctypes.Structure):
    _fields_ = (("in", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_longlong))


PRELUDE = """
#include <hip/hip_runtime_api.h>
struct KdaDecodeParams { const float *in; float *out; long long n; };
#define THREAD static_cast<int>(__builtin_amdgcn_workitem_id_x())
#define WORKGROUP static_cast<int>(__builtin_amdgcn_workgroup_id_x())
static float dpp(float a, int control, int rows = 0xf, int banks = 0xf, bool bound = true, float old = -1.0f) {
  return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(
      __builtin_bit_cast(int, old), __builtin_bit_cast(int, a), control, rows, banks, bound));
}
static void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""

LAUNCHER = """
extern "C" __attribute__((visibility("default"))) int run(const KdaDecodeParams *params, void *) {
  void *arguments[] = {const_cast<KdaDecodeParams *>(params)};
  return hipLaunchKernel((const void *)kernel, dim3(WORKGROUPS), dim3(THREADS), arguments, 0, nullptr);
}
"""


RECURSION = """
struct Recursion {
  static float down(float *a, long long n) {
    volatile float frame[64];
    frame[n & 63] = 1.0f;
    return n == 0 ? *a : down(a, n - 1) + frame[n & 63];
  }
};
"""


def compile_body(body, *, workgroups=1, threads=64, lds_bytes=256, launcher=LAUNCHER):
    text = f"{PRELUDE}\n#define WORKGROUPS {workgroups}\n#define THREADS {threads}\n"
    text += f"__global__ void kernel(KdaDecodeParams p) {{\n{body}\n}}\n{launcher}"
    return emulator.compile_source(text, lds_bytes=lds_bytes)


def run(kernel: EmulatedKernel, values: torch.Tensor | None = None, *, n=64, cores=None, **options):
    """Run a kernel over `in` (read) and `out` (256 floats, -1); returns the report and `out`."""
    source = torch.arange(256, dtype=torch.float32) if values is None else values
    out = torch.full((256,), -1.0)
    params = Params(source.data_ptr(), out.data_ptr(), n)
    intervals = [Interval.of("in", source, writable=False), Interval.of("out", out, writable=True)]
    return kernel.launch("run", params, intervals, EmulatorOptions(threads=cores, **options)), out


def launch(body, values=None, *, workgroups=1, threads=64, lds_bytes=256, launcher=LAUNCHER, **settings):
    """Compile `body` as a kernel and run it."""
    kernel = compile_body(body, workgroups=workgroups, threads=threads, lds_bytes=lds_bytes, launcher=launcher)
    return run(kernel, values, **settings)


def kinds(report):
    return [fault.kind for fault in report.faults]


FAULTS = {
    "race": (
        "p.out[THREAD / 2] = 1.0f;",
        "p.out[THREAD] = 1.0f;",
        FaultKind.RACE,
        "a write of 4 bytes at byte 0 of out races with lane 0",
    ),
    "race through LDS": (
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; p.out[THREAD] = lds[63 - THREAD];",
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; barrier(); p.out[THREAD] = lds[63 - THREAD];",
        FaultKind.RACE,
        "at LDS byte",
    ),
    "unwritten LDS": (
        "__shared__ float lds[64]; if (THREAD < 63) lds[THREAD] = 1.0f; barrier(); p.out[THREAD] = lds[THREAD];",
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; barrier(); p.out[THREAD] = lds[THREAD];",
        FaultKind.UNINITIALISED_LDS,
        "a read of 4 bytes at LDS byte 252 that nobody wrote",
    ),
    "a block copy past the end": (
        "if (THREAD == 0) __builtin_memcpy(p.out + 249, p.in, 32);",
        "if (THREAD == 0) __builtin_memcpy(p.out + 248, p.in, 32);",
        FaultKind.GLOBAL_BOUNDS,
        "a write of 32 bytes at byte 996 of out",
    ),
    "a stack that overflows": (
        RECURSION + "p.out[THREAD] = Recursion::down(&p.out[THREAD], 100 * p.n);",
        RECURSION + "p.out[THREAD] = Recursion::down(&p.out[THREAD], p.n);",
        FaultKind.GLOBAL_BOUNDS,
        "a lane's stack of 65536 bytes overflows",
    ),
    "LDS overflow": (
        "__shared__ float lds[64]; float *a = lds; a[THREAD + p.n - 63] = 1.0f;",
        "__shared__ float lds[64]; float *a = lds; a[THREAD + p.n - 64] = 1.0f;",
        FaultKind.LDS_BOUNDS,
        "a write of 4 bytes at LDS byte 256 of 256",
    ),
    "global overrun": (
        "p.out[THREAD] = p.in[THREAD * 4 + 1 + 3 * (THREAD == 63)];",
        "p.out[THREAD] = p.in[THREAD * 4 + 1];",
        FaultKind.GLOBAL_BOUNDS,
        "a read of 4 bytes outside every declared tensor row and live slot, 0 bytes past in",
    ),
    "a write to an input": (
        "const_cast<float *>(p.in)[THREAD] = 0.0f;",
        "p.out[THREAD] = p.in[THREAD];",
        FaultKind.READ_ONLY,
        "a write of 4 bytes at byte 0 of in",
    ),
    "a barrier some lanes skip": (
        "if (THREAD < 40) barrier();",
        "barrier();",
        FaultKind.DIVERGENCE,
        "a barrier is not reached by lanes 40-63",
    ),
    "a DPP some lanes skip": (
        "if (THREAD >= 16) p.out[THREAD] = dpp(1.0f, 0xb1);",
        "p.out[THREAD] = dpp(1.0f, 0xb1);",
        FaultKind.DIVERGENCE,
        "a DPP is not reached by lanes 0-15",
    ),
    "lanes at different DPPs": (
        "p.out[THREAD] = THREAD < 8 ? dpp(1.0f, 0xb1) : dpp(1.0f, 0x4e);",
        "p.out[THREAD] = dpp(1.0f, 0x4e);",
        FaultKind.DIVERGENCE,
        "lanes of a wave meet at different DPP operations",
    ),
    "a broken promise": (
        "p.out[THREAD] = __builtin_amdgcn_readfirstlane(THREAD / 32);",
        "p.out[THREAD] = __builtin_amdgcn_readfirstlane(THREAD / 64);",
        FaultKind.NOT_UNIFORM,
        "is 0 in lane 0 and 1 in lane 32",
    ),
    "no release": (
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; __builtin_amdgcn_s_barrier();"
        '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); p.out[THREAD] = lds[63 - THREAD];',
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; barrier(); p.out[THREAD] = lds[63 - THREAD];",
        FaultKind.MISSING_FENCE,
        "no release fence stands before the barrier",
    ),
    "no acquire": (
        '__shared__ float lds[64]; lds[THREAD] = 1.0f; __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");'
        "__builtin_amdgcn_s_barrier(); p.out[THREAD] = lds[63 - THREAD];",
        "__shared__ float lds[64]; lds[THREAD] = 1.0f; barrier(); p.out[THREAD] = lds[63 - THREAD];",
        FaultKind.MISSING_FENCE,
        "no acquire fence stands after the barrier",
    ),
    "no such DPP": (
        "p.out[THREAD] = dpp(1.0f, 0x1ff);",
        "p.out[THREAD] = dpp(1.0f, 0x140);",
        FaultKind.BAD_DPP,
        "no such DPP control: 511",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_clean_twin_passes(name):
    faulty, clean, kind, message = FAULTS[name]
    report, _ = launch(faulty)
    (found,) = [fault for fault in report.faults if fault.kind is kind]
    assert message in found.message
    assert found.message.startswith("workgroup 0, lane ")
    report, _ = launch(clean)
    assert report.faults == ()


def test_workgroups_of_one_launch_race_whatever_their_barriers():
    report, _ = launch("barrier(); if (THREAD == 0) p.out[0] = 1.0f;", workgroups=8)
    assert kinds(report) == [FaultKind.RACE]
    assert "races with workgroup" in report.faults[0].message
    report, _ = launch("if (THREAD == 0) p.out[WORKGROUP] = p.in[0];", workgroups=8)
    assert report.faults == ()


def test_a_write_after_many_readers_names_them_together():
    report, _ = launch("float a = p.out[0]; if (WORKGROUP == 7) p.out[0] = a + 1;", workgroups=8, threads=1)
    assert report.faults[0].message.endswith("a write of 4 bytes at byte 0 of out races with several workgroups")
    report, _ = launch("float a = p.out[0]; if (THREAD == 63) p.out[0] = a + 1;")
    assert report.faults[0].message.endswith("a write of 4 bytes at byte 0 of out races with several lanes")


def test_launches_of_one_stream_are_ordered():
    """Two workgroups swap their elements from one launch to the next."""
    body = "if (THREAD == 0) p.out[(WORKGROUP + p.n) % 2] = p.n;"
    once = "return hipLaunchKernel((const void *)kernel, dim3(WORKGROUPS), dim3(THREADS), arguments, 0, nullptr);"
    twice = (
        once.replace("return ", "") + "KdaDecodeParams second = *params; ++second.n; arguments[0] = &second; " + once
    )
    report, out = launch(body, workgroups=2, launcher=LAUNCHER.replace(once, twice))
    assert report.faults == () and report.workgroups == 4 and out[:2].tolist() == [65.0, 65.0]


def test_as_many_host_threads_as_a_large_machine_has():
    report, out = launch("barrier(); if (THREAD == 0) p.out[WORKGROUP] = 1.0f;", workgroups=256, threads=256, cores=256)
    assert report.faults == () and (out == 1.0).all()


def test_a_barrier_orders_accesses_to_global_memory():
    report, out = launch("p.out[THREAD] = 1.0f; barrier(); p.out[63 - THREAD] = 2.0f;")
    assert report.faults == () and (out[:64] == 2.0).all()


def test_lds_is_fresh_in_every_workgroup():
    body = (
        "__shared__ float lds[64]; if (WORKGROUP == 0) lds[THREAD] = 1.0f; barrier(); p.out[64 * WORKGROUP] = lds[0];"
    )
    report, _ = launch(
        body.replace("p.out[64 * WORKGROUP]", "if (THREAD == 0) p.out[WORKGROUP]"), workgroups=2, threads=64
    )
    assert kinds(report) == [FaultKind.UNINITIALISED_LDS]


def test_a_good_launch_follows_a_faulty_one():
    for _ in range(3):
        assert kinds(launch("p.out[1 << 20] = 1.0f;")[0]) == [FaultKind.GLOBAL_BOUNDS]
        report, out = launch("p.out[THREAD] = p.in[THREAD];")
        assert report.faults == () and torch.equal(out[:64], torch.arange(64.0))


FUNCTIONS = {"exp2f": lambda x: 2.0**x, "logf": math.log2, "rcpf": lambda x: 1 / x, "rsqf": lambda x: x**-0.5}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("math_mode", ["exact", "low", "high", "random"])
def test_hardware_functions_err_within_their_bound_and_do_err(name, math_mode):
    values = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 4 + 0.01
    body = f"p.out[THREAD] = __builtin_amdgcn_{name}(p.in[THREAD]);"
    _, out = launch(body, values, threads=256, math=math_mode, math_ulps=1.0)
    errors = []
    for x, y in zip(values.tolist(), out.tolist(), strict=True):
        exact = FUNCTIONS[name](x)
        errors.append((y - exact) / 2.0 ** (math.frexp(exact)[1] - 24))
    bound = 0.5 if math_mode == "exact" else 1.0
    assert max(map(abs, errors)) <= bound + 1e-6
    if math_mode == "low":
        assert max(errors) < 0.001
    if math_mode == "high":
        assert min(errors) > -0.001
    if math_mode == "random":
        assert max(errors) > 0.5 and min(errors) < -0.5
        _, again = launch(body, values, threads=256, math=math_mode, math_seed=1)
        assert not torch.equal(out, again)


def test_specials_of_the_hardware_functions():
    inf, nan = math.inf, math.nan
    values = torch.zeros(256)
    values[:6] = torch.tensor([0.0, inf, -inf, nan, -1.0, 1e-40])
    wanted = {
        "exp2f": [1.0, inf, 0.0, nan, 0.5, 1.0],
        "logf": [-inf, inf, nan, nan, nan, -inf],
        "rcpf": [inf, 0.0, -0.0, nan, -1.0, inf],
        "rsqf": [inf, 0.0, nan, nan, nan, inf],
    }
    for name, expected in wanted.items():
        _, out = launch(f"p.out[THREAD] = __builtin_amdgcn_{name}(p.in[THREAD]);", values)
        for lane, (got, want) in enumerate(zip(out.tolist(), expected, strict=False)):
            same = math.isnan(got) if math.isnan(want) else got == pytest.approx(want, rel=2e-7)
            assert same, (name, lane, got, want)


def test_only_a_stated_multiply_add_is_fused():
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24, which a product that was rounded first has lost."""
    values = torch.full((256,), 1 + 2.0**-12)
    values[1] = -(1 + 2.0**-11)
    body = "float a = p.in[0], c = p.in[1]; p.out[0] = a * a + c; p.out[1] = __builtin_fmaf(a, a, c);"
    body += "p.out[2] = __builtin_elementwise_fma(a, a, c);"
    _, out = launch(body, values, threads=1)
    assert out[:3].tolist() == [0.0, 2.0**-24, 2.0**-24]


def test_bf16_rounds_to_nearest_even():
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7F800001, 0x00008000]
    bits += [0x00018000, 0x80000001, 0xFFC00000]
    values = torch.zeros(256)
    values[: len(bits)] = torch.tensor([struct.unpack("<f", struct.pack("<I", b))[0] for b in bits])
    values.view(torch.int32)[: len(bits)] = torch.tensor([b - 2**32 if b >> 31 else b for b in bits], dtype=torch.int32)
    body = "p.out[THREAD] = __builtin_bit_cast(float, static_cast<unsigned>(__builtin_bit_cast(unsigned short, "
    body += "static_cast<__bf16>(p.in[THREAD]))) << 16);"
    _, out = launch(body, values)
    expected = values.to(torch.bfloat16).float()
    assert torch.equal(out[: len(bits)].isnan(), expected[: len(bits)].isnan())
    assert torch.equal(out[: len(bits)].nan_to_num(), expected[: len(bits)].nan_to_num())


def test_shuffled_lanes_change_nothing_that_is_ordered():
    body = "__shared__ float lds[256]; lds[THREAD] = p.in[THREAD]; barrier(); "
    body += "p.out[THREAD] = dpp(lds[255 - THREAD], 0xb1);"
    _, natural = launch(body, threads=256, lds_bytes=1024)
    for seed in range(10):
        report, out = launch(body, threads=256, lds_bytes=1024, lane_order_seed=seed)
        assert report.faults == () and torch.equal(out, natural)


def test_a_source_that_does_not_compile_says_command_line_and_log():
    with pytest.raises(
        BuildError, match=r"expected \S*\+\+\S* .* to succeed, got: .*error: .*nonsense.* \(all of it in .*\.log\)"
    ):
        launch("nonsense();")


def test_a_missing_launcher_is_named():
    kernel = emulator.compile_source(f"{PRELUDE}__global__ void kernel(KdaDecodeParams) {{}}", lds_bytes=0)
    with pytest.raises(EmulatorError, match="symbol: expected an extern \"C\" launcher of the source, got 'run'"):
        kernel.launch("run", Params(), [])


def test_overlapping_outputs_are_refused():
    text = PRELUDE + 'extern "C" __attribute__((visibility("default"))) int run(const void *, void *) { return 0; }'
    kernel = emulator.compile_source(text, lds_bytes=0)
    tensor = torch.zeros(8)
    intervals = [Interval.of("a", tensor, writable=True), Interval.of("b", tensor[4:], writable=False)]
    with pytest.raises(EmulatorError, match="intervals: expected a and b apart, got an overlap"):
        kernel.launch("run", Params(), intervals)


def test_an_unknown_math_mode_is_refused():
    with pytest.raises(EmulatorError, match="math: expected one of exact, low, high, random, got 'fast'"):
        launch("", math="fast")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ToolchainError, match="CXX: expected a C\\+\\+ compiler, got 'no-such-compiler', which is not found"
    ):
        launch("")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolchainError, match="found none; on Debian: apt-get install g\\+\\+"):
        launch("")


def test_two_processes_may_compile_at_once(tmp_path):
    script = "from tests.test_emulator import launch; r, o = launch('p.out[THREAD] = 5.0f;'); assert o[0] == 5.0"
    environment = {"KDAGEN_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=".") for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    assert len(list((tmp_path / "emulator").iterdir())) == 2, "a runtime and a kernel, and nothing left beside them"
