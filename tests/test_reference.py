"""The oracle against an independent naive loop and against values computed by hand."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from kdagen import reference
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
    arguments = case.arguments()
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


def test_the_softplus_gate_is_exact_on_both_sides():
    """A threshold at 20, or log(1 + exp(g)) taken at its word, shows at the ends."""
    arguments = uniform_arguments(x=0.0, state=1.0, gate=-20.0, beta=0.0, bound=None, norm=False)
    assert abs(1 - float(oracle(arguments).state[0, 0, 0, 0]) - 2.0611536e-9) < 1e-15
    arguments = uniform_arguments(x=0.0, state=1.0, gate=25.0, beta=0.0, bound=None, norm=False)
    assert float(oracle(arguments).state[0, 0, 0, 0]) == pytest.approx(1.3887943865e-11, rel=1e-9)


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


@pytest.mark.parametrize(("value", "normalised"), [(1e-2, 0.0883849), (1e-3, 0.0880451), (1e-4, 0.0662266), (0.0, 0.0)])
def test_fr_31_reference_l2_norm_eps(value, normalised):
    vector = torch.full((128,), value, dtype=torch.float64)
    assert (reference._l2_normalised(vector) - normalised).abs().max() < 5e-8


def test_fr_31_reference_seen_from_outside():
    x = float(torch.tensor(2.0027e-4, dtype=torch.bfloat16))
    result = oracle(uniform_arguments(x=x, state=0.0, gate=0.0, beta=0.0, bound=-5.0, norm=False))
    assert (result.state / 3.31828e-6 - 1).abs().max() < 2e-6


def test_both_conv_layouts_are_one_to_the_oracle():
    arguments = plain_arguments(2, [1], 2)
    ds = {**arguments, "conv_state": arguments["conv_state"].contiguous()}
    assert torch.equal(oracle(arguments).out, oracle(ds).out)


@pytest.mark.parametrize("values", Values)
def test_every_kind_of_values_gives_a_finite_result(values):
    for gate in Gate:
        case = dataclasses.replace(
            Case(2, 2, gate, OutputNorm.GATED, ConvLayout.SD), values=values, strides=Strides.WIDE
        )
        assert oracle(case.arguments()).out.isfinite().all()


def test_a_large_batch_takes_seconds():
    rows, heads = 128, 96
    arguments = plain_arguments(heads, [1] * 1, 2)
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
