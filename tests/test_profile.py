"""Figures of a profile of hand-written instructions: classes, memory, occupancy, recurrence, and paths to a wait."""

from __future__ import annotations

import subprocess

import pytest

from kdagen import isa, toolchain
from kdagen.errors import ToolchainError
from kdagen.machine_code import class_of, instance_names, memory_kind, read_profiles, static_cycles
from kdagen.machine_paths import FirstWait, first_waits, vector_wait
from kdagen.target import CDNA
from kdagen.toolchain import find_tool
from tests.profiles import ARCH, compiler, written

PADDED = """
#include <hip/hip_runtime_api.h>
#define KERNEL extern "C" __attribute__((global))
KERNEL void first(float *a) { a[0] = 1.0f; }
KERNEL __attribute__((aligned(4096))) void second(float *a) { a[0] = 2.0f; }
"""
LOAD, STORE = "global_load_dwordx4 v[2:5], v0, s[0:1] nt", "global_store_dwordx4 v0, v[2:5], s[0:1] nt"
OTHER = "global_load_dword v1, v0, s[0:1]"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("v_add_f32_dpp v0, v0, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1", "DPP"),
        ("v_mov_b32_dpp v68, v0 row_newbcast:0 row_mask:0xf bank_mask:0xf bound_ctrl:1", "DPP"),
        ("v_exp_f32_e32 v1, v1", "transcendental"),
        ("v_rsq_f32_e32 v1, v1", "transcendental"),
        ("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel_hi:[0,1,1]", "packed fp32"),
        ("v_fma_f32 v0, v1, v2, v3", "VALU"),
        ("v_accvgpr_write_b32 a0, v0", "VALU"),
        (LOAD, "vector memory"),
        ("scratch_store_dword off, v0, s32", "vector memory"),
        ("ds_read_b128 v[0:3], v4", "LDS"),
        ("s_barrier", "barrier"),
        ("s_waitcnt vmcnt(0)", "wait"),
        ("s_nop 1", "nop"),
        ("s_load_dword s0, s[2:3], 0x0", "scalar"),
        ("s_cbranch_vccz L0", "scalar"),
        ("image_load v0, v1, s[0:7]", "other"),
    ],
)
def test_classes(line, expected):
    assert class_of(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LOAD, "global load 16 nt"),
        ("global_store_dwordx4 v[0:1], v[2:5], off offset:256 glc slc", "global store 16 glc slc"),
        ("global_load_ushort v82, v93, s[4:5]", "global load 2"),
        ("global_load_dwordx3 v[10:12], v[58:59], off", "global load 12"),
        ("flat_load_dword v0, v[2:3] sc0 sc1", "flat load 4 sc0 sc1"),
        ("global_load_short_d16_hi v0, v[2:3], off", "global load 2"),
        ("scratch_store_dword off, v0, s32", "scratch store 4"),
    ],
)
def test_memory_by_width_and_policy(line, expected):
    assert memory_kind(line) == expected


@pytest.mark.parametrize(
    ("figures", "waves", "workgroups"),
    [
        ({"vgprs": 128}, 4, 4),
        ({"vgprs": 129}, 3, 3),
        ({"vgprs": 64}, 8, 8),
        ({"vgprs": 24}, 8, 8),  # eight is all that a SIMD holds
        ({"vgprs": 256, "workgroup_threads": 512}, 2, 1),
        ({"vgprs": 257, "workgroup_threads": 64}, 1, 4),
        ({"vgprs": 64, "lds_bytes": 20 * 1024}, 8, 3),
        ({"vgprs": 64, "lds_bytes": 20 * 1024, "arch": "gfx950"}, 8, 8),
        ({"vgprs": 64, "lds_bytes": 0}, 8, 8),
        ({"vgprs": 64, "sgprs": 112}, 7, 7),
    ],
)
def test_occupancy(figures, waves, workgroups):
    profile = written("s_endpgm", **figures)
    assert (profile.waves_per_simd, profile.workgroups_per_cu) == (waves, workgroups)
    assert profile.state_bytes_in_flight == workgroups * 65536


def test_the_recurrence_is_from_the_barrier_before_the_first_state_store_to_the_last():
    wait = "s_waitcnt vmcnt(3)"
    profile = written("s_barrier", wait, LOAD, "s_barrier", wait, "L0:", wait, STORE, wait, STORE, wait, "s_barrier")
    assert profile.recurrence == range(4, 9)  # labels are no instructions
    assert profile.recurrence_waits == 3
    assert written("s_barrier", wait, LOAD).recurrence_waits == 0
    assert written(wait, "s_waitcnt lgkmcnt(0)", STORE).recurrence_waits == 1


def test_a_wait_on_vector_memory():
    assert vector_wait("s_waitcnt vmcnt(15) lgkmcnt(1)") == 15
    assert vector_wait("s_waitcnt lgkmcnt(0)") is None
    assert vector_wait("s_barrier") is None


def test_a_wait_counts_where_its_wave_has_asked_for_something():
    assert first_waits([OTHER, "s_waitcnt vmcnt(0)", LOAD], 1) == (FirstWait(1, 0),)
    assert first_waits([OTHER, "s_waitcnt vmcnt(1)", LOAD], 1) == (FirstWait(None, 1),)
    assert first_waits(["s_waitcnt vmcnt(0)", LOAD], 1) == (FirstWait(None, 1),)
    assert first_waits([LOAD, "s_waitcnt vmcnt(0)", LOAD], 1) == (FirstWait(1, 1),)
    assert first_waits([LOAD, LOAD, "s_waitcnt vmcnt(0)"], 1) == (FirstWait(None, 2),)


# Waves of section 3 ask for nothing and pass the wait; the others ask and pass around it.
SECTIONS = (
    "v_readfirstlane_b32 s2, v0",
    "s_lshr_b32 s33, s2, 6",
    "s_cmp_lg_u32 s33, 3",
    "s_cselect_b64 s[6:7], -1, 0",
    "s_and_b64 vcc, exec, s[6:7]",
    "s_cbranch_vccz L0",
    OTHER,
    "s_branch L1",
    "L0:",
    "s_waitcnt vmcnt(0)",
    "L1:",
    LOAD,
    "s_endpgm",
)


def test_each_wave_goes_its_own_way():
    assert first_waits(SECTIONS, 4) == (FirstWait(None, 1),)
    asks_first = (OTHER, *SECTIONS)
    assert first_waits(asks_first, 3) == (FirstWait(None, 1),)
    assert first_waits(asks_first, 4) == (FirstWait(10, 0), FirstWait(None, 1))


def test_a_branch_on_an_unknown_value_goes_both_ways():
    unknown = ("s_load_dword s33, s[0:1], 0x0", *SECTIONS[2:])
    assert first_waits((OTHER, *unknown), 1) == (FirstWait(9, 0), FirstWait(None, 1))
    overwritten = (*SECTIONS[:2], "s_load_dwordx2 s[32:33], s[0:1], 0x0", *SECTIONS[2:])
    assert FirstWait(11, 0) in first_waits((OTHER, *overwritten), 1)


def test_a_loop_ends():
    looping = ("L0:", "s_load_dword s4, s[0:1], 0x0", "s_cmp_eq_u32 s4, 0", "s_cbranch_scc1 L0", LOAD, "s_endpgm")
    assert first_waits(looping, 1) == (FirstWait(None, 1),)


def test_symbols_of_the_instances():
    names = instance_names("kda_decode_h12_cdna")
    assert names["_Z19kda_decode_h12_cdnaILb1ELb1ELb0EEv15KdaDecodeParams"] == "bounded-norm-sd"
    assert names["_Z19kda_decode_h12_cdnaILb0ELb0ELb1EEv15KdaDecodeParams"] == "softplus-nonorm-ds"
    assert len(names) == 8


def test_an_instruction_that_the_model_does_not_know_is_named():
    try:
        find_tool("llvm-mca")
    except ToolchainError as error:
        pytest.skip(str(error))
    assert static_cycles(["v_rcp_f32_e32 v0, v0"] * 10, "gfx942") > static_cycles(["v_rcp_f32_e32 v0, v0"], "gfx942")
    message = r"expected .*llvm-mca.* to know every instruction of gfx942, got: error: .*: v_frobnicate v0"
    with pytest.raises(ToolchainError, match=message):
        static_cycles(["s_nop 0", "v_frobnicate v0"], "gfx942")


def test_padding_behind_a_kernel_is_not_of_it(tmp_path):
    """The assembler fills it with s_nop, which a disassembler cannot tell from the kernel's own."""
    source = tmp_path / "padded.hip"
    source.write_text(PADDED)
    found = compiler()
    code_object = toolchain.compile_device(found, ARCH, source, tmp_path / "padded.co", CDNA.flags)
    raw = subprocess.run(
        [find_tool("llvm-objdump"), "-d", str(code_object)], capture_output=True, text=True, check=True
    )
    assert raw.stdout.count("s_nop 0") > 100
    assert isa.disassemble(code_object)["first"][-1] == "s_endpgm"
    profiles = {profile.instance: profile for profile in read_profiles(code_object, "", ARCH, state_bytes=0)}
    assert profiles["first"].lines[-1] == "s_endpgm" and profiles["first"].classes["nop"] == 0
