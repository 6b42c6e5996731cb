"""Tuning without a GPU: candidates, the merging of measurements into bands, and the file that keeps them."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdagen import bench_tune
from kdagen.bands import BANDS
from kdagen.bench_tune import Measured, bands_text, merge
from kdagen.cli import main
from kdagen.plan import make_plan
from kdagen.spec import KernelSpec
from kdagen.target import CDNA, CUDA, TARGETS
from kdagen.tuning import Band, Prefetch, SliceIn, Tuning

SMALL = Tuning(workgroups_per_head=4, rows_together=2, slice_in=SliceIn.LDS, prefetch=Prefetch.SLOT)
LARGE = Tuning(slice_in=SliceIn.LDS, prefetch=Prefetch.SLOT, lookahead=99)
MIDDLE = Tuning(rows_together=4)


def test_the_committed_bands_are_in_the_form_that_tuning_writes():
    path = Path(bench_tune.__file__).with_name("bands.py")
    assert path.read_text(encoding="utf-8") == bands_text(BANDS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_candidate_fits_its_target_and_the_bands_are_candidates(target):
    found = bench_tune.candidates(target)
    assert len(found) == len(set(found)) >= 2
    for tuning in found:
        make_plan(KernelSpec(bench_tune.HEADS), target, tuning)
    assert {band.tuning for band in BANDS[target.name]} <= set(found)


def test_a_target_without_a_feature_has_no_candidate_that_needs_it():
    assert all(tuning.slice_in is SliceIn.REGISTERS for tuning in bench_tune.candidates(CDNA))
    assert any(tuning.slice_in is SliceIn.LDS for tuning in bench_tune.candidates(CUDA))


def test_each_batch_size_gets_the_tuning_that_is_fastest_there():
    measured = Measured(12, (1, 2, 64, 128), {SMALL: (2.0, 3.0, 40.0, 80.0), LARGE: (3.0, 4.0, 27.0, 52.0)})
    assert merge(measured) == [(0, 1, SMALL), (2, 3, LARGE)]


def test_a_band_that_saves_less_than_it_costs_is_merged_away():
    times = {SMALL: (2.0, 3.0, 27.5), MIDDLE: (2.5, 2.99, 27.2), LARGE: (3.0, 4.0, 27.0)}
    measured = Measured(12, (1, 2, 64), times)
    assert merge(measured) == [(0, 2, SMALL)]
    assert merge(measured, band_cost=0.0) == [(0, 0, SMALL), (1, 1, MIDDLE), (2, 2, LARGE)]


@given(
    st.lists(st.tuples(*[st.floats(1.0, 100.0)] * 3), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_no_other_bands_have_less_loss(columns, cost):
    tunings = (SMALL, MIDDLE, LARGE)
    measured = Measured(
        12, tuple(range(1, len(columns) + 1)), {t: tuple(c[i] for c in columns) for i, t in enumerate(tunings)}
    )

    def loss(assigned):
        bands = 1 + sum(a != b for a, b in itertools.pairwise(assigned))
        return bands * cost + sum(c[a] / min(c) - 1 for c, a in zip(columns, assigned, strict=True))

    assigned = [tunings.index(tuning) for first, last, tuning in merge(measured, cost) for _ in range(first, last + 1)]
    everything = [()]
    for _ in columns:
        everything = [(*one, i) for one in everything for i in range(3)]
    assert loss(assigned) == pytest.approx(min(map(loss, everything)))


def test_bands_carry_their_figures_and_those_of_their_neighbours():
    measured = Measured(12, (1, 2, 64), {SMALL: (2.0, 3.0, 40.0), LARGE: (3.0, 4.0, 27.0)})
    lower, upper = bench_tune.bands_of(measured, "A GPU", "2026-01-02")
    assert lower == Band(
        24,
        SMALL,
        "A GPU, 2026-01-02, us a layer at 12 heads, rows 1, 2: 2.00 3.00; the upper band's tuning 3.00 4.00",
    )
    assert upper.most_work is None and upper.reason.endswith("rows 64: 27.00; the lower band's tuning 40.00")


def test_the_file_gives_the_bands_back_and_is_formatted(tmp_path):
    bands = {
        "cdna": (Band(None, Tuning(), 'a "short" reason'),),
        "cuda": (Band(16, SMALL, "why " * 40), Band(None, LARGE, "a reason " * 10)),
    }
    bands = {name: tuple(Band(b.most_work, b.tuning, b.reason.strip()) for b in of) for name, of in bands.items()}
    path = tmp_path / "bands.py"
    path.write_text(bands_text(bands), encoding="utf-8")
    written: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    assert written["BANDS"] == bands
    done = subprocess.run([sys.executable, "-m", "black", "-q", "--check", "-l", "120", str(path)], check=False)
    assert done.returncode == 0


def test_the_table_marks_the_fastest():
    lines = bench_tune.table(Measured(12, (1, 64), {SMALL: (2.0, 40.0), LARGE: (3.0, 27.0)})).splitlines()
    assert lines[1].endswith("2.00*  40.00") and lines[2].endswith("3.00   27.00*")


def test_bad_requests_are_refused(tmp_path, capsys):
    assert main(["bench", "--tune", str(tmp_path / "bands.py"), "--heads", "12,24"]) == 2
    assert capsys.readouterr().err == "kdagen: --heads: expected one head count with --tune, got 2\n"
    assert main(["bench", "--tune", str(tmp_path / "bands.py")]) == 1
    assert "bench: expected a GPU that torch sees" in capsys.readouterr().err
    assert not (tmp_path / "bands.py").exists()
