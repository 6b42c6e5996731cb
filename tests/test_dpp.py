import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdagen import dpp
from kdagen.errors import PlanError


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32, 64])
@given(values=st.lists(st.integers(-1000, 1000), min_size=64, max_size=64))
def test_every_lane_ends_with_the_sum_of_its_group(lanes, values):
    final = dpp.run_steps(dpp.plan_sum(lanes).steps, values)
    for lane in range(64):
        start = lane - lane % lanes
        assert final[lane] == sum(values[start : start + lanes])


def test_a_row_sum_is_four_dpp_adds_that_a_reviewer_can_name():
    steps = dpp.plan_sum(16).steps
    assert [step.control.name for step in steps] == [
        "quad_perm:[1,0,3,2]",
        "quad_perm:[2,3,0,1]",
        "row_half_mirror",
        "row_mirror",
    ]
    assert [step.control.code for step in steps] == [0xB1, 0x4E, 0x141, 0x140]
    assert [step.effect.split(",")[0] for step in steps] == ["xor 1", "xor 2", "xor 4", "xor 8"]


@pytest.mark.parametrize("lanes", [0, 1, 3, 24, 128, "16"])
def test_other_group_sizes_are_refused(lanes):
    with pytest.raises(PlanError, match=r"lanes: expected a power of two from 2 to 64, got"):
        dpp.plan_sum(lanes)


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32, 64])
def test_the_proof_fails_for_every_step_left_out_and_every_mask_narrowed(lanes):
    plan = dpp.plan_sum(lanes)
    for index, step in enumerate(plan.steps):
        shorter = plan.steps[:index] + plan.steps[index + 1 :]
        with pytest.raises(PlanError, match=f"sum over {lanes} lanes: expected lane"):
            dpp.prove_sum(dpp.SumPlan(lanes, shorter))
        if isinstance(step, dpp.AddStep):
            masked = dataclasses.replace(step, bank_mask=0b0111)
            with pytest.raises(PlanError):
                dpp.prove_sum(dpp.SumPlan(lanes, (*plan.steps[:index], masked, *plan.steps[index + 1 :])))


@pytest.mark.parametrize("sums", [1, 2, 4, 8, 16])
@given(seed=st.integers(0, 2**32))
def test_a_halving_gives_each_lane_its_own_sum_of_its_row(sums, seed):
    numbers = random.Random(seed)
    values = [[numbers.randint(-1000, 1000) for _ in range(sums)] for _ in range(64)]
    for lane, held in enumerate(dpp.run_halving(dpp.plan_halving(sums), values)):
        row, own = lane - lane % 16, lane % 16 * sums // 16
        assert held == [sum(values[row + i][own] for i in range(16))]


@pytest.mark.parametrize("sums", [1, 2, 4, 8, 16])
def test_the_proof_of_a_halving_fails_for_every_control_and_bit_changed(sums):
    plan = dpp.plan_halving(sums)
    assert sum(max(step.left, 1) for step in plan.steps) == {1: 4, 2: 4, 4: 5, 8: 8, 16: 15}[sums]  # adds
    for index, step in enumerate(plan.steps):
        changes = [dataclasses.replace(step, control=dpp.row_ror(3))]
        if step.left:
            changes.append(
                dataclasses.replace(step, bit=16 // step.bit // 2 if step.bit not in (4, 2) else 6 - step.bit)
            )
        for change in changes:
            with pytest.raises(PlanError, match=f"{sums} sums over a row: expected lane"):
                dpp.prove_halving(dpp.HalvingPlan(sums, (*plan.steps[:index], change, *plan.steps[index + 1 :])))


def test_other_numbers_of_sums_are_refused():
    with pytest.raises(PlanError, match="sums: expected a power of two from 1 to 16, got 3"):
        dpp.plan_halving(3)


def test_the_lane_model_of_every_control():
    """FR-58: rows are 16 lanes; a row control never crosses them, and a broadcast adds a row once."""
    lane_of = {
        dpp.quad_perm(3, 0, 1, 2): [3, 0, 1, 2, 7, 4, 5, 6],
        dpp.row_shl(1): [1, 2, 3, 4, 5, 6, 7, 8],
        dpp.row_shr(1): [None, 0, 1, 2, 3, 4, 5, 6],
        dpp.row_ror(4): [12, 13, 14, 15, 0, 1, 2, 3],
        dpp.ROW_MIRROR: [15, 14, 13, 12, 11, 10, 9, 8],
        dpp.ROW_HALF_MIRROR: [7, 6, 5, 4, 3, 2, 1, 0],
        dpp.row_newbcast(5): [5] * 8,
    }
    for control, first_eight in lane_of.items():
        assert [control.source(lane) for lane in range(8)] == first_eight, control
        for lane in range(64):
            source = control.source(lane)
            assert source is None or source // 16 == lane // 16, control
    assert [dpp.ROW_BCAST15.source(lane) for lane in (0, 15, 16, 31, 32, 63)] == [None, None, 15, 15, 31, 47]
    assert [dpp.ROW_BCAST31.source(lane) for lane in (0, 31, 32, 63)] == [None, None, 31, 31]
    assert dpp.row_shl(1).source(15) is None


def test_an_unknown_control_is_refused():
    with pytest.raises(PlanError, match="dpp control: expected one that the lane model knows, got 0x1ff"):
        dpp.Control(0x1FF, "nonsense").source(0)
