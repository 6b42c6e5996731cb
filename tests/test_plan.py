import dataclasses

import pytest

from kdagen.errors import PlanError, SpecError
from kdagen.plan import Tuning, make_plan
from kdagen.spec import KernelSpec
from kdagen.target import CDNA, CUDA, TARGETS, find_target, target_of
from kdagen.variants import VARIANTS, on_demand


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_element_of_a_slice_has_one_owner(target):
    plan = make_plan(KernelSpec(12), target, Tuning())
    owners = set()
    for thread in range(plan.threads):
        wave, lane = divmod(thread, target.wave_size)
        for i in range(plan.rows_per_lane):
            row = wave * plan.rows_per_wave + i * plan.rows_at_once + lane // plan.lanes_per_row
            for part in range(plan.parts):
                column = part * 4 * plan.lanes_per_row + 4 * (lane % plan.lanes_per_row)
                owners.update((row, column + c) for c in range(4))
    assert len(owners) == 128 * 128 == plan.threads * plan.rows_per_lane * plan.parts * 4


def test_a_plan_prints_on_one_line():
    assert str(make_plan(KernelSpec(12), CDNA, Tuning())) == (
        "256 threads, 4 waves, 16 lanes a row, 8 rows a lane, 2624 B LDS, at most 128 VGPRs"
    )


@pytest.mark.parametrize(
    ("target", "tuning", "message"),
    [
        (
            CDNA,
            Tuning(5),
            "min_waves_per_simd: expected room for 64 state registers and 48 others, got 102 per lane at 5",
        ),
        (CDNA, Tuning(0), "min_waves_per_simd: expected an int of 1 or more, got 0"),
        (dataclasses.replace(CDNA, lds_bytes=2048), Tuning(), "lds_bytes: expected at most 2048 on cdna, got 2624"),
        (dataclasses.replace(CDNA, wave_size=48), Tuning(), "target: expected a wave size that divides the 64 channel"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_field(target, tuning, message):
    with pytest.raises(PlanError) as raised:
        make_plan(KernelSpec(12), target, tuning)
    assert str(raised.value).startswith(message)


def test_the_table_serves_the_head_counts_of_the_models_once_each():
    assert {v.spec.num_heads for v in VARIANTS} >= {4, 6, 8, 12, 16, 24, 32, 48, 64, 96}
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    assert all(v.reason for v in VARIANTS)


def test_a_head_count_on_demand_takes_the_table_row_when_there_is_one():
    assert on_demand(12) in VARIANTS and on_demand(12, CUDA) in VARIANTS
    assert on_demand(1021).name == "kda_decode_h1021_cdna"
    with pytest.raises(SpecError):
        on_demand(0)


def test_an_unknown_target_lists_the_known_ones():
    assert find_target("cdna") is CDNA
    with pytest.raises(SpecError, match="target: expected one of cdna, cuda, got 'rdna'"):
        find_target("rdna")
    assert target_of("gfx942") is CDNA and target_of("sm_90") is CUDA
    with pytest.raises(SpecError, match="arch: expected one of gfx90a, gfx942, gfx950, sm_90, got 'gfx1100'"):
        target_of("gfx1100")
