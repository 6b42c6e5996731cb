import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdagen.cases import Case, NullRows, Strides, Values, matrix
from kdagen.errors import SpecError
from kdagen.spec import INSTANCES, ConvLayout, Gate, OutputNorm

PLAIN = Case(4, 3, Gate.BOUNDED, OutputNorm.GATED, ConvLayout.SD)

cases = st.builds(
    Case,
    num_heads=st.integers(1, 128),
    rows=st.integers(0, 9),
    gate=st.sampled_from(Gate),
    output_norm=st.sampled_from(OutputNorm),
    conv_layout=st.sampled_from(ConvLayout),
    bias=st.booleans(),
    null_rows=st.sampled_from(NullRows),
    strides=st.sampled_from(Strides),
    values=st.sampled_from(Values),
    first_live_slot=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)


@given(case=cases)
def test_a_token_reads_back_as_its_case(case):
    assert Case.parse(case.token()) == case


@given(case=cases)
def test_live_slots_are_distinct_and_inside_the_pool(case):
    rows, slots = case.live()
    assert len(set(slots)) == len(slots) == len(rows)
    assert all(case.first_live_slot <= slot < case.slots for slot in slots)
    assert len(case.indices()) == case.rows


@pytest.mark.parametrize("token", ["", "h12", PLAIN.token() + "-x", PLAIN.token().replace("bounded", "open"), "h12-b3"])
def test_another_token_is_refused_with_an_example(token):
    with pytest.raises(
        SpecError, match=r"case: expected a token such as h12-b3-bounded-norm-sd-bias-live-dense-unit-f1-s0"
    ):
        Case.parse(token)


@pytest.mark.parametrize("strides", [Strides.DENSE, Strides.PAGED, Strides.WIDE])
@pytest.mark.parametrize("layout", ConvLayout)
def test_what_no_row_names_is_poisoned(strides, layout):
    case = dataclasses.replace(PLAIN, strides=strides, conv_layout=layout, null_rows=NullRows.MIXED)
    arguments = case.arguments()
    spare = [slot for slot in range(case.slots) if slot not in case.live()[1]]
    assert spare
    for pool in (arguments["state"], arguments["conv_state"]):
        assert pool[spare].isnan().all()
        assert pool[case.live()[1]].isfinite().all()
    assert arguments["out"].isnan().all()
    assert arguments["x"].isfinite().all()
    assert arguments["conv_state"].stride()[1:] == ((3, 1) if layout is ConvLayout.DS else (1, 3 * 4 * 128))


def test_a_far_pool_passes_2_31_elements():
    case = dataclasses.replace(PLAIN, rows=1, strides=Strides.FAR)
    assert case.live()[1][0] * case.arguments()["state"].stride(0) >= 2**31


def test_the_same_case_makes_the_same_arguments():
    first, second = PLAIN.arguments(), PLAIN.arguments()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(), second[name].nan_to_num()), name


@pytest.mark.parametrize("quick", [True, False])
def test_the_matrix_has_every_instance(quick):
    chosen = matrix(12, quick=quick)
    assert {(c.gate, c.output_norm, c.conv_layout) for c in chosen} == {
        (i.gate, i.output_norm, i.conv_layout) for i in INSTANCES
    }
    assert len({case.token() for case in chosen}) == len(chosen)
    if not quick:
        for field in ("null_rows", "strides", "values"):
            assert len({getattr(case, field) for case in chosen}) >= 3, field
