"""Which tuning serves which batches, by target: that with the least limit that rows * heads do not pass.

`kdagen bench --tune FILE` times candidates on the GPU that is here, and writes this file with its target's bands new.
"""

from kdagen.tuning import Band, Prefetch, SliceIn, Tuning

BANDS: dict[str, tuple[Band, ...]] = {
    "cdna": (
        Band(
            most_work=None,
            tuning=Tuning(),
            reason=(
                "not timed, no AMD GPU was at hand: with 8, 4, 2, 1 rows together gfx942's code (clang "
                "22.1.8, 12 heads, bounded-norm-sd) has 726, 743, 784, 875 instructions and 1574, 1671, "
                "1764, 2133 llvm-mca cycles"
            ),
        ),
    ),
    "cuda": (
        Band(
            most_work=12,
            tuning=Tuning(
                workgroups_per_head=4,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
            ),
            reason="NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 1: 2.50; the upper band's tuning 2.79",
        ),
        Band(
            most_work=144,
            tuning=Tuning(
                min_waves_per_simd=6,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 2, 4, 8, 12: 2.95 3.40 5.14 7.39; "
                "the lower band's tuning 3.16 4.45 7.92 10.14; the upper band's tuning 3.77 5.09 6.61 9.07"
            ),
        ),
        Band(
            most_work=None,
            tuning=Tuning(
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
                lookahead=99,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 16, 24, 32, 48, 64, 128, 256: 8.46 "
                "11.60 14.72 21.11 27.27 52.50 102.30; the lower band's tuning 9.33 13.17 16.55 23.48 29.61 "
                "55.00 105.08"
            ),
        ),
    ),
}
