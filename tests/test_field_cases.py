"""Field cases of the kernel, each by its number, on the generated text run by the emulator."""

from __future__ import annotations

import math
import mmap
import re

import pytest
import torch

from kdagen import emulator, grading, reference
from kdagen.abi import KdaDecodeParams
from kdagen.render import render
from kdagen.target import CDNA
from kdagen.variants import of_target
from tests.harness import assert_graded, cdna_variant, copied, plain_arguments, run

BF16 = torch.bfloat16


def test_fr_01_padding_rows_are_zero_and_touch_no_slot():
    arguments = plain_arguments(12, [3, 0, 0, 1], 5)
    arguments["state"][0] = 7.0
    arguments["conv_state"][0] = 3.0
    for name in ("x", "output_gate"):
        arguments[name][1:3] = torch.nan
    for name in ("raw_g", "raw_beta"):
        arguments[name][:, 1:3] = torch.nan
    before = copied(arguments)
    run(arguments, 12)
    assert (arguments["out"][:, 1:3] == 0).all()
    assert_graded(before, arguments)


@pytest.mark.parametrize("index", [4, 2**31 - 1, -1, -(2**31)])
def test_fr_03_an_index_outside_the_pool_is_null_and_canaries_survive(index):
    arguments = plain_arguments(4, [1, index], 4)
    for name in ("state", "conv_state"):
        pool = arguments[name]
        bigger = torch.full((8, *pool.shape[1:]), 99.0, dtype=pool.dtype)
        if name == "conv_state":
            bigger = bigger.transpose(1, 2).contiguous().transpose(1, 2)
        bigger[:4] = pool
        arguments[name] = bigger[:4]
    canaries = {
        name: torch.as_strided(arguments[name], (8, *arguments[name].shape[1:]), arguments[name].stride())
        for name in ("state", "conv_state")
    }
    before = copied(arguments)
    run(arguments, 4)
    assert (arguments["out"][:, 1] == 0).all()
    for pool in canaries.values():
        assert (pool[4:] == 99.0).all()
    assert_graded(before, arguments)


def test_fr_05_an_empty_batch_launches_nothing_and_the_next_call_is_right():
    assert run(plain_arguments(12, [], 3), 12).workgroups == 0
    arguments = plain_arguments(12, [1], 3)
    before = copied(arguments)
    run(arguments, 12)
    assert_graded(before, arguments)


def test_fr_05_an_all_null_batch_gives_zeros_and_touches_no_slot():
    arguments = plain_arguments(12, [0, -1, 0, 3], 3)
    before = copied(arguments)
    run(arguments, 12)
    assert (arguments["out"] == 0).all()
    assert_graded(before, arguments)


def sparse(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.mark.parametrize(("num_heads", "slot"), [(12, 10923), (96, 1366)])
def test_fr_09_the_slot_past_2_31_elements_is_reached(num_heads, slot):
    arguments = plain_arguments(num_heads, [1], 2)
    small_state, small_conv = arguments["state"], arguments["conv_state"]
    channels = 3 * num_heads * 128
    state = sparse((slot + 1) * num_heads * 128 * 128, torch.float32).view(slot + 1, num_heads, 128, 128)
    conv = sparse((slot + 1) * channels * 3, BF16).view(slot + 1, 3, channels).transpose(1, 2)
    assert slot * state.stride(0) >= 2**31
    state[slot], conv[slot] = small_state[1], small_conv[1]
    wrapped = (slot * state.stride(0)) % 2**32 // state.stride(0)
    arguments.update(state=state, conv_state=conv, state_indices=torch.tensor([slot], dtype=torch.int32))
    small = {
        **copied(arguments | {"state": small_state, "conv_state": small_conv}),
        "state_indices": torch.tensor([1], dtype=torch.int32),
    }
    before = copied(small)
    run(arguments, num_heads)
    run(small, num_heads)
    assert_graded(before, small)
    assert grading.differing_words(arguments["out"], small["out"]) == 0
    assert grading.differing_words(state[slot], small["state"][1]) == 0
    assert grading.differing_words(conv[slot], small["conv_state"][1]) == 0
    assert wrapped == slot or (state[wrapped] == 0).all()


def test_fr_11_indices_in_a_column_of_a_block_table():
    table = torch.tensor([[1, 9], [2, 9], [3, 9]], dtype=torch.int32)
    arguments = plain_arguments(12, [1, 2, 3], 8)
    dense = copied(arguments)
    arguments["state_indices"] = table[:, 0]
    run(arguments, 12)
    run(dense, 12)
    for name in ("out", "state", "conv_state"):
        assert grading.differing_words(arguments[name], dense[name]) == 0


def test_fr_12_x_gate_and_beta_are_columns_of_one_projection():
    arguments = plain_arguments(12, [1, 2, 3], 4)
    dense = copied(arguments)
    wide = torch.full((3, 6288), torch.nan, dtype=BF16)
    wide[:, :4608] = arguments["x"]
    wide[:, 4608:6144] = arguments["output_gate"].view(3, 1536)
    wide[:, 6272:6284] = arguments["raw_beta"][0]
    arguments["x"] = wide[:, :4608]
    arguments["output_gate"] = wide[:, 4608:6144].view(3, 12, 128)
    arguments["raw_beta"] = wide[:, 6272:6284].unsqueeze(0)
    run(arguments, 12)
    run(dense, 12)
    for name in ("out", "state", "conv_state"):
        assert grading.differing_words(arguments[name], dense[name]) == 0


@pytest.mark.parametrize("offset", [0, 1])
def test_fr_12_rows_may_start_at_any_element(offset):
    """An odd row stride puts every second row at 2 bytes past a multiple of 4."""
    arguments = plain_arguments(4, [1, 2, 3], 4)
    dense = copied(arguments)
    buffer = torch.full((3, 1537), torch.nan, dtype=BF16)
    view = buffer.view(-1)[offset:].as_strided((3, 1536), (1537, 1))
    view.copy_(arguments["x"])
    arguments["x"] = view
    run(arguments, 4)
    run(dense, 4)
    assert grading.differing_words(arguments["out"], dense["out"]) == 0


def test_fr_14_both_conv_layouts_agree_bit_for_bit():
    sd = plain_arguments(12, [1, 2, 3, 4], 5)
    ds = copied(sd)
    ds["conv_state"] = sd["conv_state"].contiguous()
    assert ds["conv_state"].stride() == (3 * 4608, 3, 1)
    run(sd, 12)
    run(ds, 12)
    for name in ("out", "state", "conv_state"):
        assert grading.differing_words(sd[name], ds[name]) == 0


@pytest.mark.parametrize(("rows", "orders"), [(1, 50), (64, 4)])
def test_fr_18_every_order_of_lanes_and_workgroups_gives_the_same_bits(rows, orders):
    start = plain_arguments(12, list(range(1, rows + 1)), rows + 1)
    first = copied(start)
    run(first, 12)
    assert_graded(start, first)
    for order in range(orders):
        again = copied(start)
        run(again, 12, lane_order_seed=order)
        for name in ("out", "state", "conv_state"):
            assert grading.differing_words(again[name], first[name]) == 0


def test_fr_20_nan_in_a_stale_slot_stays_there():
    arguments = plain_arguments(12, [1, 2, 0], 8)
    arguments["state"][3:] = torch.nan
    arguments["conv_state"][3:] = torch.nan
    before = copied(arguments)
    run(arguments, 12)
    assert arguments["out"].isfinite().all()
    assert_graded(before, arguments)


def test_fr_20_nan_in_a_live_slot_reaches_its_row_only():
    arguments = plain_arguments(12, [1, 2, 3], 4)
    arguments["state"][2] = torch.nan
    run(arguments, 12)
    assert arguments["out"][0, 1].isnan().all()
    assert arguments["out"][0, [0, 2]].isfinite().all()
    assert arguments["state"][[1, 3]].isfinite().all()


def test_fr_22_a_copied_slot_is_the_whole_state():
    arguments = plain_arguments(12, [1], 5)
    for step in range(3):
        arguments |= {"x": plain_arguments(12, [1], 2, seed=step)["x"]}
        run(arguments, 12)
    for name in ("state", "conv_state"):
        arguments[name][4] = arguments[name][1]
    for step in range(3, 5):
        one = plain_arguments(12, [1], 2, seed=step)
        for name in ("x", "output_gate"):
            arguments[name] = one[name].expand(2, *one[name].shape[1:]).contiguous()
        for name in ("raw_g", "raw_beta"):
            arguments[name] = one[name].expand(1, 2, *one[name].shape[2:]).contiguous()
        arguments["state_indices"] = torch.tensor([1, 4], dtype=torch.int32)
        arguments["out"] = torch.full((1, 2, 12, 128), torch.nan, dtype=BF16)
        run(arguments, 12)
        assert grading.differing_words(arguments["out"][0, 0], arguments["out"][0, 1]) == 0
        for name in ("state", "conv_state"):
            assert grading.differing_words(arguments[name][1], arguments[name][4]) == 0


def uniform_arguments(*, x: float, state: float, gate: float, beta: float, bound: float | None, norm: bool):
    """All channels alike: taps (0, 0, 0, 1), no history, A_log 0, dt_bias 0."""
    arguments = plain_arguments(4, [1], 2, norm=norm, bound=bound)
    arguments["bias"] = None
    arguments["x"].fill_(x)
    arguments["weight"].zero_()[:, 3] = 1.0
    for name in ("conv_state", "A_log", "dt_bias"):
        arguments[name].zero_()
    arguments["state"].fill_(state)
    arguments["raw_g"].fill_(gate)
    arguments["raw_beta"].fill_(beta)
    if norm:
        arguments["output_gate"].zero_()
        arguments["norm_weight"].fill_(1.0)
    return arguments


@pytest.mark.parametrize(
    ("bound", "gate", "state"), [(-5.0, 0.0, 0.0733510), (None, 0.0, 0.2823085), (-5.0, 5.0, 0.0357922)]
)
def test_fr_27_the_bounded_gate_is_a_sigmoid_and_not_a_clamp(bound, gate, state):
    arguments = uniform_arguments(x=1.0, state=1.0, gate=gate, beta=0.0, bound=bound, norm=True)
    run(arguments, 4)
    assert arguments["state"][1].double().sub(state).abs().max() < 1e-7


def test_fr_29_beta_is_a_logit_and_its_sigmoid_is_taken_once():
    arguments = uniform_arguments(x=1.0, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=False)
    run(arguments, 4)
    assert arguments["state"][1].double().sub(0.0323085).abs().max() < 1e-7
    assert (arguments["out"] == torch.tensor(0.0322266, dtype=BF16)).all()


def test_fr_31_the_l2_norm_adds_its_eps_inside_the_sum():
    x = float(torch.tensor(2.0027e-4, dtype=BF16))
    arguments = uniform_arguments(x=x, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=False)
    run(arguments, 4)
    assert arguments["state"][1].double().div(3.31828e-6).sub(1).abs().max() < 2e-6


def test_fr_31_a_zero_vector_stays_zero():
    arguments = uniform_arguments(x=0.0, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=True)
    run(arguments, 4)
    assert (arguments["state"][1] == 0).all() and (arguments["out"] == 0).all()


def test_fr_33_nothing_is_rounded_to_bf16_before_the_output():
    before = plain_arguments(12, list(range(1, 8)), 8)
    after = copied(before)
    run(after, 12)
    assert_graded(before, after)
    loose = reference.fused_kda_decode(**{**before, "out": None}, rounding=reference.Rounding.CHAIN)
    chain_error = grading.state_error(after["state"][1:], loose.state)
    assert grading.STATE_TOLERANCE < chain_error, "the two policies must differ, or this test proves nothing"
    assert (after["state"][1:].double() - loose.state).abs().max() < 2e-2
    assert (after["out"].double() - loose.out).abs().max() < 3e-2 * loose.out.abs().max()


@pytest.mark.parametrize("variant", of_target(CDNA), ids=lambda v: v.name)
def test_fr_56_the_wave_size_is_a_literal_of_the_target(variant):
    text = render(variant)
    assert not re.search(r"warpSize|WAVEFRONT_SIZE|__AMDGCN_WAVE", text)
    assert "wave of 64 lanes" in text.split("#include")[0] and "kWaveLanes" not in text  # nothing depends on it


ROW_SUM_KERNEL = """
KERNEL void row_sum(KdaDecodeParams p) {
  if (thread_index() % 64 >= p.rows) return;
  p.state[thread_index()] = sum_over_row(p.weight[thread_index()]);
}
extern "C" __attribute__((visibility("default"))) int row_sum_launch(const KdaDecodeParams *params, void *stream) {
  return launch(row_sum, 1, *params, stream);
}
"""


def row_sums(values: list[float], active_lanes: int = 64) -> list[float]:
    """The rendered reduction alone, over the 64 lanes of wave 0 of a workgroup of 256 threads."""
    prelude = render(cdna_variant(12)).split("// ---- who works on what")[0]
    kernel = emulator.compile_source(prelude + ROW_SUM_KERNEL, lds_bytes=0)
    source = torch.zeros(256)
    source[:64] = torch.tensor(values)
    sums = torch.full((256,), torch.nan)
    params = KdaDecodeParams(weight=source.data_ptr(), state=sums.data_ptr(), rows=active_lanes)
    intervals = [
        emulator.Interval.of("weight", source, writable=False),
        emulator.Interval.of("state", sums, writable=True),
    ]
    report = kernel.launch(
        "row_sum_launch", params, intervals, emulator.EmulatorOptions(allow_inactive_lanes=active_lanes < 64)
    )
    assert report.faults == ()
    return [float(v) for v in sums[:64]]


def test_fr_58_every_lane_is_added_exactly_once_to_its_row_of_16():
    for lane in range(64):
        sums = row_sums([float(i == lane) for i in range(64)])
        assert sums == [float(i // 16 == lane // 16) for i in range(64)]


def test_fr_58_no_lane_is_added_twice():
    assert row_sums([2.0 ** (i % 16) for i in range(64)]) == [65535.0] * 64


def test_fr_58_with_only_the_first_row_active():
    sums = row_sums([2.0 ** (i % 16) for i in range(64)], active_lanes=16)
    assert sums[:16] == [65535.0] * 16 and all(math.isnan(s) for s in sums[16:])


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("num_heads", [3, 4, 6, 8, 11, 12, 16, 24, 32, 48, 96])
def test_fr_71_every_head_count_is_right(num_heads, rows):
    before = plain_arguments(num_heads, list(range(rows, 0, -1)), rows + 1, seed=num_heads)
    after = copied(before)
    run(after, num_heads)
    assert_graded(before, after)


def test_a_thousand_steps_drift_no_further_than_an_fp32_loop():
    arguments = plain_arguments(4, [1], 2)
    fp32 = copied(arguments)
    exact = copied(arguments)
    exact_state = exact["state"].double()
    fp32_state = fp32["state"].clone()
    for step in range(1000):
        new = plain_arguments(4, [1], 2, seed=step)
        tokens = {name: new[name] for name in ("x", "raw_g", "raw_beta", "output_gate")}
        arguments |= tokens
        run(arguments, 4)
        for dtype, state in ((torch.float64, exact_state), (torch.float32, fp32_state)):
            call = {**arguments, **tokens, "state": state, "conv_state": exact["conv_state"], "out": None}
            result = reference.fused_kda_decode(**call, dtype=dtype)
            state[1] = result.state[0]
        old = exact["conv_state"][1]
        exact["conv_state"][1] = torch.stack([old[:, 1], old[:, 2], tokens["x"][0]], dim=1)
    kernel_drift = grading.state_error(arguments["state"][1:], exact_state[1:])
    loop_drift = grading.state_error(fp32_state[1:], exact_state[1:])
    assert kernel_drift <= max(loop_drift, grading.STATE_TOLERANCE)
