"""What lanes of a wave exchange on the emulator: every DPP control, lane reads, and lanes that have returned."""

from __future__ import annotations

import shutil

import pytest
import torch

from kdagen import dpp, emulator, toolchain
from kdagen.emulator import EmulatorOptions, FaultKind
from kdagen.errors import PlanError
from kdagen.paths import generated_dir
from tests.harness import cdna_variant, copied, plain_arguments
from tests.test_emulator import compile_body, kinds, launch, run

ROWS = [list(range(row, row + 16)) for row in range(0, 64, 16)]
LANES = list(range(64))


def sources(code: int) -> list[int | None] | None:
    """The lane that each lane reads under a control, None outside; None for no control. Written with slices, where the
    emulator computes indices: a third reading of "CDNA3 Instruction Set Architecture", section "DPP"."""
    n, kind = code & 0xF, code >> 4
    if code <= 0xFF:
        picks = [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6]
        return [quad + pick for quad in range(0, 64, 4) for pick in picks]
    of_row = {
        0x10: lambda row: row[n:] + [None] * n,  # row_shl
        0x11: lambda row: [None] * n + row[: 16 - n],  # row_shr
        0x12: lambda row: row[-n:] + row[:-n],  # row_ror
        0x15: lambda row: [row[n]] * 16,  # row_newbcast
    }
    if kind in of_row and (n != 0 or kind == 0x15):
        return [lane for row in ROWS for lane in of_row[kind](row)]
    whole = {
        0x130: [*LANES[1:], None],  # wave_shl
        0x134: LANES[1:] + LANES[:1],  # wave_rol
        0x138: [None, *LANES[:-1]],  # wave_shr
        0x13C: LANES[-1:] + LANES[:-1],  # wave_ror
        0x140: [lane for row in ROWS for lane in reversed(row)],  # row_mirror
        0x141: [lane for row in ROWS for lane in row[7::-1] + row[:7:-1]],  # row_half_mirror
        0x142: [None] * 16 + [15] * 16 + [31] * 16 + [47] * 16,  # row_bcast:15
        0x143: [None] * 32 + [31] * 32,  # row_bcast:31
    }
    return whole.get(code)


# The control comes at run time, which a GPU's compiler would not take: one kernel for all of them.
ANY_DPP = "p.out[THREAD] = dpp(p.in[THREAD], p.n & 0x3ff, p.n >> 10 & 0xf, p.n >> 14 & 0xf, p.n >> 18);"


@pytest.fixture(scope="module")
def any_dpp():
    return compile_body(ANY_DPP)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("rows", "banks"), [(0xF, 0xF), (0xA, 0x6), (0x1, 0xF), (0xF, 0x8)])
def test_every_dpp_control_moves_lanes_as_the_isa_says(any_dpp, bound, rows, banks):
    for code in range(0x200):
        report, out = run(any_dpp, n=code | rows << 10 | banks << 14 | bound << 18, cores=1)
        expected = sources(code)
        if expected is None:
            assert kinds(report) == [FaultKind.BAD_DPP], hex(code)
            continue
        assert report.faults == (), hex(code)
        for lane, source in enumerate(expected):
            enabled = rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1
            wanted = -1.0 if not enabled else float(source) if source is not None else 0.0 if bound else -1.0
            assert out[lane] == wanted, (hex(code), lane)


def test_the_planner_reads_the_isa_alike():
    known = 0
    for code in range(0x200):
        try:
            planned = [dpp.Control(code, "").source(lane) for lane in LANES]
        except PlanError:
            continue
        known += 1
        assert planned == sources(code), hex(code)
    assert known == 256 + 3 * 15 + 4 + 16, "quad_perm; row_shl, row_shr, row_ror; mirrors and broadcasts; row_newbcast"


def test_inactive_lanes_read_as_outside():
    body = "if (THREAD < 16) return; p.out[THREAD] = dpp(p.in[THREAD], 0x142);  // row_bcast:15"
    report, out = launch(body, allow_inactive_lanes=True)
    assert report.faults == ()
    assert (out[:16] == -1).all() and (out[16:32] == 0).all() and (out[32:48] == 31).all()
    report, _ = launch(body)
    assert kinds(report) == [FaultKind.DIVERGENCE]


def test_a_barrier_waits_for_no_inactive_lane():
    body = "if (THREAD >= 40) return; p.out[THREAD] = 1.0f; barrier(); p.out[39 - THREAD] = 2.0f;"
    report, out = launch(body, allow_inactive_lanes=True)
    assert report.faults == () and out[:41].tolist() == [2.0] * 40 + [-1.0]
    report, _ = launch(body)
    assert kinds(report) == [FaultKind.DIVERGENCE]


@pytest.mark.parametrize(("lane", "wanted"), [(0, 0.0), (63, 63.0), (-1, 63.0), (69, 5.0)])
def test_a_lane_read_takes_six_bits_of_the_lane(lane, wanted):
    report, out = launch("p.out[THREAD] = __builtin_amdgcn_readlane(THREAD, p.n);", n=lane)
    assert report.faults == () and (out[:64] == wanted).all()


def test_a_read_of_a_lane_that_is_not_active_is_found():
    report, _ = launch("p.out[THREAD] = __builtin_amdgcn_readlane(THREAD, p.n);", n=63, threads=32)
    assert kinds(report) == [FaultKind.DIVERGENCE]
    assert report.faults[0].message.endswith("a lane read names lane 63, which is not active")
    body = "if (THREAD == 5) return; p.out[THREAD] = __builtin_amdgcn_readlane(THREAD, p.n);"
    assert kinds(launch(body, n=5, allow_inactive_lanes=True)[0]) == [FaultKind.DIVERGENCE]
    assert kinds(launch(body, n=6, allow_inactive_lanes=True)[0]) == []


def test_mbcnt_counts_the_lower_lanes():
    body = "p.out[THREAD] = __builtin_amdgcn_mbcnt_hi(p.n >> 32, __builtin_amdgcn_mbcnt_lo(p.n, 100));"
    for mask in (-1, 0x0123456789ABCDEF, 1 << 31, 1 << 32):
        _, out = launch(body, threads=128, n=mask)
        counts = [100.0 + (mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]
        assert out[:128].tolist() == counts * 2, hex(mask)


def test_two_host_compilers_give_the_same_bits(monkeypatch, capsys):
    """g++ and clang++ stand in for each other: neither contracts, reorders or drops what the text says."""
    clang = next((c.path for c in toolchain.candidates("hip") if "clang++" in c.path), None) or shutil.which("clang++")
    if clang is None:
        pytest.skip("expected clang++ beside g++, found none")
    variant, arguments, outputs = cdna_variant(12), plain_arguments(12, [1, 0, 4, 2], 6), []
    for command in ("g++", clang):
        monkeypatch.setenv("CXX", command)
        kernel = emulator.compile_source(generated_dir() / variant.file_name, lds_bytes=variant.plan.lds_bytes)
        call = copied(arguments)
        report = emulator.run_decode(kernel, variant.launch_symbol, **call, options=EmulatorOptions(lane_order_seed=1))
        assert report.faults == ()
        outputs.append([call[name].contiguous().view(torch.uint8) for name in ("state", "conv_state", "out")])
        with capsys.disabled():
            print(f"\n{command}: {report.workgroups / report.seconds:.0f} workgroups/s")
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
