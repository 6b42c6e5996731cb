"""The oracle against an independent naive loop and against values computed by hand."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdagen import grading, reference
from kdagen.bf16 import rounded_to_bf16
from kdagen.cases import Case, NullRows, Strides, Values, matrix
from kdagen.errors import ArgumentError
from kdagen.spec import ConvLayout, Gate, OutputNorm
from tests import naive
from tests.harness import copied, plain_arguments
from tests.test_field_cases import uniform_arguments


def oracle(arguments, **settings):
    return reference.fused_kda_decode(**{**arguments, "out": None}, **settings)


@pytest.mark.parametrize("case", matrix(2, quick=True), ids=lambda case: case.token())
def test_the_oracle_agrees_with_a_naive_loop(case):
    arguments = {**case.arguments(), "norm_eps": (1e-5, 1e-2)[case.seed % 2]}
    result = oracle(arguments)
    for row, head in [(row, row % 2) for row in case.live()[0]]:
        expected = naive.step(arguments, row, head)
        for name, got in (
            ("out", result.out[0, row, head]),
            ("unnormed", result.unnormed[0, row, head]),
            ("state", result.state[row, head]),
        ):
            torch.testing.assert_close(got, torch.tensor(expected[name], dtype=torch.float64), rtol=1e-10, atol=1e-12)
        window = result.conv_state[row].view(3, 2, 128, 3)[:, head]
        assert torch.equal(window, torch.tensor(expected["window"], dtype=torch.bfloat16))


def test_nothing_is_written_to_the_arguments():
    arguments = plain_arguments(2, [1, 0, 2], 3)
    before = copied(arguments)
    oracle(arguments)
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(), arguments[name].nan_to_num()), name


@pytest.mark.parametrize("null_rows", [NullRows.MIXED, NullRows.ALL, NullRows.PADDING])
def test_null_rows_give_zeros_whatever_their_inputs(null_rows):
    case = Case(2, 4, Gate.BOUNDED, OutputNorm.GATED, ConvLayout.SD, null_rows=null_rows)
    arguments = case.arguments()
    null = [row for row in range(4) if row not in case.live()[0]]
    arguments["x"][null] = torch.nan
    result = oracle(arguments)
    assert (result.out[0, null] == 0).all() and (result.state[null] == 0).all()
    assert result.out.isfinite().all()


@settings(max_examples=20, deadline=None)
@given(indices=st.lists(st.integers(-3, 8), max_size=5), first_live=st.integers(0, 3))
def test_only_named_live_slots_change_in_the_pools_after(indices, first_live):
    slots = 6
    live = {row: slot for row, slot in enumerate(indices) if first_live <= slot < slots}
    arguments = {**plain_arguments(1, indices, slots), "first_live_slot": first_live}
    if len(set(live.values())) != len(live):
        with pytest.raises(ArgumentError, match="expected each live slot once"):
            oracle(arguments)
        return
    result = oracle(arguments)
    conv_state, state = result.pools_after(arguments["conv_state"], arguments["state"])
    changed = {
        slot
        for slot in range(slots)
        if grading.differing_words(state[slot], arguments["state"][slot])
        or grading.differing_words(conv_state[slot], arguments["conv_state"][slot])
    }
    assert changed == set(live.values())
    for row, slot in live.items():
        assert torch.equal(state[slot], result.state[row].float())
        assert torch.equal(conv_state[slot], result.conv_state[row])


def test_an_output_rounds_to_bf16_once():
    """Just above a tie of bf16, and nearer to it than fp32 can tell: by way of fp32 it would go to the even side."""
    tie, beyond = 1 + 2.0**-8, 2.0**-40
    expected = {
        tie - beyond: 1.0,
        tie: 1.0,
        tie + beyond: 1 + 2.0**-7,
        -tie - beyond: -1 - 2.0**-7,
        # One fp32 step short of a tie whose even side is the far one: to be left where it is.
        1 + 3 * 2.0**-8 - 2.0**-23 + beyond: 1 + 2.0**-7,
        0.0: 0.0,
        torch.inf: torch.inf,
    }
    values = torch.tensor(list(expected), dtype=torch.float64)
    assert rounded_to_bf16(values).tolist() == list(expected.values())
    single = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded_to_bf16(single), single.bfloat16())
    arguments = plain_arguments(2, [1, 0], 2)
    result = oracle(arguments)
    assert result.out_bf16.dtype is torch.bfloat16
    assert grading.output_ulps(result.out_bf16, result.out) == 0


@pytest.mark.parametrize("missing", ["output_gate", "norm_weight"])
def test_half_an_output_norm_is_refused(missing):
    with pytest.raises(
        ArgumentError, match=f"output_gate and norm_weight: expected both or neither, got {missing}=None alone"
    ):
        oracle({**plain_arguments(2, [1], 2), missing: None})


def test_a_slot_named_twice_is_refused():
    with pytest.raises(ArgumentError, match="state_indices: expected each live slot once, got slot 2 3 times"):
        oracle(plain_arguments(2, [1, 2, 2, 0, 0, 2], 3))


def test_the_chain_rounding_rounds_q_k_v_and_o():
    arguments = plain_arguments(2, [1], 2)
    chain = oracle(arguments, rounding=reference.Rounding.CHAIN)
    assert torch.equal(chain.unnormed, chain.unnormed.bfloat16().double())
    exact = oracle(arguments)
    difference = (chain.state - exact.state).abs().max() / exact.state.abs().max()
    assert 1e-5 < difference < 1e-2


def test_fp32_and_fp64_agree_to_fp32():
    arguments = plain_arguments(4, [1, 2], 3)
    torch.testing.assert_close(
        oracle(arguments, dtype=torch.float32).state.double(), oracle(arguments).state, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("gate", "rate_log"), [(20.125, 0.0), (-30.0, 30.0)])
def test_the_softplus_gate_is_exact_on_both_sides(gate, rate_log):
    """A threshold at 20 shows above it, by exp(-20.125) = 2e-9; log(1 + exp(g)) taken at its word at -30, by 1e-3."""
    arguments = uniform_arguments(x=0.0, state=1.0, gate=gate, beta=0.0, bound=None, norm=False)
    arguments["A_log"].fill_(rate_log)
    softplus = max(gate, 0.0) + math.log1p(math.exp(-abs(gate)))
    decay = math.exp(-math.exp(rate_log) * softplus)
    assert float(oracle(arguments).state[0, 0, 0, 0]) == pytest.approx(decay, rel=1e-12, abs=0.0)


@settings(max_examples=50, deadline=None)
@given(gate=st.floats(-30, 30), bound=st.floats(-20, -0.01) | st.none())
def test_the_decay_lies_between_its_bound_and_one(gate, bound):
    """x is 0, so that the new state is the decay; the bound of the softplus form is 0."""
    arguments = uniform_arguments(x=0.0, state=1.0, gate=gate, beta=0.0, bound=bound, norm=False)
    decay = oracle(arguments).state[0, 0, 0]
    lowest = torch.tensor(bound, dtype=torch.float64).exp() if bound is not None else 0.0
    assert (lowest < decay).all() and (decay < 1).all()


def test_fr_01_reference_padding_rows():
    arguments = plain_arguments(12, [3, 0, 0, 1], 5)
    arguments["state"][0], arguments["conv_state"][0] = 7.0, 3.0
    for name in ("x", "output_gate"):
        arguments[name][1:3] = torch.nan
    for name in ("raw_g", "raw_beta"):
        arguments[name][:, 1:3] = torch.nan
    result = oracle(arguments)
    assert (result.out[0, 1:3] == 0).all() and result.out.isfinite().all()
    conv_state, state = result.pools_after(arguments["conv_state"], arguments["state"])
    assert (state[0] == 7.0).all() and (conv_state[0] == 3.0).all()
    for slot in (2, 4):
        assert torch.equal(state[slot], arguments["state"][slot])
        assert torch.equal(conv_state[slot], arguments["conv_state"][slot])


def test_fr_20_reference_nan_in_a_stale_slot_stays_there():
    arguments = plain_arguments(12, [1, 2, 0], 8)
    arguments["state"][3:], arguments["conv_state"][3:] = torch.nan, torch.nan
    result = oracle(arguments)
    assert result.out.isfinite().all()
    pools = result.pools_after(arguments["conv_state"], arguments["state"])
    for after, before in zip(pools, (arguments["conv_state"], arguments["state"]), strict=True):
        assert grading.differing_words(after[3:], before[3:]) == 0
        assert after[:3].isfinite().all()


def test_fr_20_reference_nan_in_a_live_slot_reaches_its_row_only():
    arguments = plain_arguments(12, [1, 2, 3], 4)
    arguments["state"][2] = torch.nan
    result = oracle(arguments)
    assert result.out[0, 1].isnan().all() and result.state[1].isnan().all()
    assert result.out[0, [0, 2]].isfinite().all() and result.state[[0, 2]].isfinite().all()


def test_fr_22_reference_a_copied_slot_is_the_whole_state():
    arguments = plain_arguments(12, [1], 5)
    for step in range(5):
        inputs = plain_arguments(12, [1], 1, seed=step)
        rows = [1] if step < 3 else [1, 4]
        if step == 3:
            for name in ("state", "conv_state"):
                arguments[name][4] = arguments[name][1]
        for name in ("x", "output_gate"):
            arguments[name] = torch.cat([inputs[name]] * len(rows))
        for name in ("raw_g", "raw_beta"):
            arguments[name] = torch.cat([inputs[name]] * len(rows), dim=1)
        arguments["state_indices"] = torch.tensor(rows, dtype=torch.int32)
        result = oracle(arguments)
        arguments["conv_state"], arguments["state"] = result.pools_after(arguments["conv_state"], arguments["state"])
        assert torch.equal(result.out[0, 0], result.out[0, -1])
        if step >= 3:
            for name in ("state", "conv_state"):
                assert torch.equal(arguments[name][1], arguments[name][4])
    assert not torch.equal(arguments["state"][1], plain_arguments(12, [1], 5)["state"][1])


@pytest.mark.parametrize(
    ("bound", "gate", "state"), [(-5.0, 0.0, 0.0733510), (None, 0.0, 0.2823085), (-5.0, 5.0, 0.0357922)]
)
def test_fr_27_reference_gate_form(bound, gate, state):
    arguments = uniform_arguments(x=1.0, state=1.0, gate=gate, beta=0.0, bound=bound, norm=True)
    result = oracle(arguments)
    assert (result.state - state).abs().max() < 5e-8
    if gate == 0.0:
        assert float(result.out[0, 0, 0, 0]) == pytest.approx(0.4995 if bound else 0.5, abs=1e-4)


def test_fr_29_reference_beta_is_a_logit():
    result = oracle(uniform_arguments(x=1.0, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=False))
    assert (result.state - 0.0323085).abs().max() < 5e-8
    assert (result.out - 0.0323085).abs().max() < 5e-8
    assert (result.out_bf16 == torch.tensor(0.0322266, dtype=torch.bfloat16)).all()


@pytest.mark.parametrize(("value", "normalised"), [(1e-2, 0.0883849), (1e-3, 0.0880451), (1e-4, 0.0662266), (0.0, 0.0)])
def test_fr_31_reference_l2_norm_eps(value, normalised):
    vector = torch.full((128,), value, dtype=torch.float64)
    assert (reference._l2_normalised(vector) - normalised).abs().max() < 5e-8


def test_fr_31_reference_seen_from_outside():
    x = float(torch.tensor(2.0027e-4, dtype=torch.bfloat16))
    result = oracle(uniform_arguments(x=x, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=False))
    assert (result.state / 3.31828e-6 - 1).abs().max() < 2e-6


def test_fr_31_reference_a_zero_vector_stays_zero():
    result = oracle(uniform_arguments(x=0.0, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=True))
    assert (result.out == 0).all() and (result.state == 0).all()


def test_fr_33_reference_rounding_policy():
    """Each policy to itself within fp32, to the other within the bounds of unfused kernels and no nearer."""
    arguments = plain_arguments(12, list(range(1, 8)), 8)
    exact, chain = oracle(arguments), oracle(arguments, rounding=reference.Rounding.CHAIN)
    single = oracle(arguments, dtype=torch.float32)
    assert grading.state_error(single.state, exact.state) < grading.STATE_TOLERANCE
    assert grading.output_ulps(single.out_bf16, exact.out) <= grading.OUTPUT_TOLERANCE_ULPS
    assert grading.state_error(chain.state, exact.state) > 100 * grading.STATE_TOLERANCE
    assert grading.state_error(chain.state, exact.state) < 2e-3
    assert (chain.out - exact.out).abs().max() < 3e-2 * exact.out.abs().max()
    history = arguments["conv_state"][1:]
    window = torch.stack([history[:, :, 1], history[:, :, 2], arguments["x"]], dim=2)
    assert grading.differing_words(exact.conv_state, window) == 0


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 3))
def test_both_conv_layouts_are_one_to_the_oracle(seed, rows):
    arguments = plain_arguments(2, list(range(1, rows + 1)), rows + 1, seed=seed)
    ds = {**arguments, "conv_state": arguments["conv_state"].contiguous()}
    assert arguments["conv_state"].stride()[1:] != ds["conv_state"].stride()[1:]
    first, second = oracle(arguments), oracle(ds)
    for name in ("out", "state", "conv_state"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("values", Values)
def test_every_kind_of_values_gives_a_finite_result(values):
    for gate in Gate:
        case = dataclasses.replace(
            Case(2, 2, gate, OutputNorm.GATED, ConvLayout.SD), values=values, strides=Strides.WIDE
        )
        assert oracle(case.arguments()).out.isfinite().all()


def test_a_large_batch_takes_seconds():
    """128 rows of 96 heads took 2 to 7 s on 2 cores, idle and busy; the naive loop needs 170 s for them."""
    rows, heads = 128, 96
    arguments = plain_arguments(heads, [1], 2)
    for name in ("x", "output_gate"):
        arguments[name] = arguments[name].expand(rows, *arguments[name].shape[1:])
    for name in ("raw_g", "raw_beta"):
        arguments[name] = arguments[name].expand(1, rows, *arguments[name].shape[2:])
    arguments["state"] = arguments["state"][1:].expand(rows + 1, -1, -1, -1)
    arguments["conv_state"] = arguments["conv_state"][1:].expand(rows + 1, -1, -1)
    arguments["state_indices"] = torch.arange(1, rows + 1, dtype=torch.int32)
    start = time.monotonic()
    result = oracle(arguments, dtype=torch.float32)
    print(f"{rows} rows of {heads} heads in {time.monotonic() - start:.1f} s")
    assert torch.equal(result.out[0, 0], result.out[0, -1])
