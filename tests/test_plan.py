import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdagen.bands import BANDS
from kdagen.errors import PlanError, SpecError
from kdagen.plan import make_plan
from kdagen.spec import KernelSpec
from kdagen.target import CDNA, CUDA, TARGETS, find_target, target_of
from kdagen.tuning import Band, Prefetch, SliceIn, Tuning
from kdagen.variants import VARIANTS, bands_of, variants_of


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_element_of_a_slice_has_one_owner(variant):
    plan, team = variant.plan, variant.tuning.workgroups_per_head
    row_groups = plan.threads // plan.lanes_per_row
    owners = set()
    for member in range(team):
        for thread in range(plan.threads):
            for i in range(plan.rows_per_lane):
                row = member * (128 // team) + i * row_groups + thread // plan.lanes_per_row
                for part in range(plan.parts):
                    column = part * 4 * plan.lanes_per_row + 4 * (thread % plan.lanes_per_row)
                    owners.update((row, column + c) for c in range(4))
    assert len(owners) == 128 * 128 == team * plan.threads * plan.rows_per_lane * plan.parts * 4


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
            "min_waves_per_simd: expected room for 64 state registers and 52 others, got 102 per lane at 5",
        ),
        (CDNA, Tuning(workgroups_per_head=3), "workgroups_per_head: expected 1, 2, 4 or 8, got 3"),
        (CUDA, Tuning(lookahead=-1), "lookahead: expected an int of 0 or more, got -1"),
        (CUDA, Tuning(lookahead=8), "lookahead: expected 0 without a prefetch of the slot, got 8"),
        (CUDA, Tuning(inputs_ahead=1), "inputs_ahead: expected True or False, got 1"),
        (CUDA, Tuning(inputs_ahead=True), "inputs_ahead: expected False without a lookahead, got True"),
        (CUDA, Tuning(rows_together=3), "sums: expected a power of two from 1 to 16, got 3"),
        (CDNA, Tuning(workgroups_per_head=2), "workgroups_per_head: expected 1 on cdna, which has no clusters"),
        (
            CDNA,
            Tuning(slice_in=SliceIn.LDS),
            "slice_in: expected SliceIn.REGISTERS on cdna, which has no bulk copies into LDS",
        ),
        (
            CDNA,
            Tuning(prefetch=Prefetch.SLOT),
            "prefetch: expected Prefetch.NOTHING on cdna, which has no kernels that start",
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


def test_a_head_count_that_is_not_in_the_table_gets_the_same_kernels():
    assert set(variants_of(12)) < set(VARIANTS) and set(variants_of(12, CUDA)) < set(VARIANTS)
    assert [variant.name for variant in variants_of(1021)] == ["kda_decode_h1021_cdna"]
    with pytest.raises(SpecError):
        variants_of(0)


@given(
    limits=st.lists(st.integers(1, 400), unique=True, max_size=5),
    num_heads=st.integers(1, 200),
    rows=st.integers(1, 500),
)
def test_every_batch_has_the_smallest_band_that_holds_it_and_no_band_is_without_a_batch(limits, num_heads, rows):
    bands = tuple(Band(limit, Tuning(), "") for limit in [*sorted(limits), None])
    chosen = bands_of(num_heads, bands)

    def serving(candidates):
        return next(b for b in candidates if b.most_work is None or rows * num_heads <= b.most_work)

    assert serving(chosen) == serving(bands)
    served = {
        next(b.most_work for b in chosen if b.most_work is None or n * num_heads <= b.most_work) for n in range(1, 402)
    }
    assert served == {band.most_work for band in chosen}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_the_bands_of_a_target_are_in_order_and_serve_every_batch(target):
    limits = [band.most_work for band in BANDS[target.name]]
    assert limits[-1] is None and limits[:-1] == sorted(set(limits[:-1]))
    assert all(band.reason for band in BANDS[target.name])


def test_an_unknown_target_lists_the_known_ones():
    assert find_target("cdna") is CDNA
    with pytest.raises(SpecError, match="target: expected one of cdna, cuda, got 'rdna'"):
        find_target("rdna")
    assert target_of("gfx942") is CDNA and target_of("sm_90") is CUDA
    with pytest.raises(SpecError, match="arch: expected one of gfx90a, gfx942, gfx950, sm_90, got 'gfx1100'"):
        target_of("gfx1100")
