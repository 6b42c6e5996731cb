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
            most_work=24,
            tuning=Tuning(
                workgroups_per_head=4,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.KEPT_SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 1, 2: 2.03 2.38; the upper band's "
                "tuning 2.37 2.56"
            ),
        ),
        Band(
            most_work=48,
            tuning=Tuning(
                min_waves_per_simd=6,
                workgroups_per_head=2,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 3, 4: 2.81 3.25; the lower band's "
                "tuning 3.02 3.42; the upper band's tuning 3.04 3.26"
            ),
        ),
        Band(
            most_work=72,
            tuning=Tuning(
                min_waves_per_simd=6,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 6: 3.93; the lower band's tuning "
                "4.28; the upper band's tuning 4.25"
            ),
        ),
        Band(
            most_work=96,
            tuning=Tuning(
                min_waves_per_simd=6,
                workgroups_per_head=2,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.KEPT_SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 8: 4.51; the lower band's tuning "
                "4.68; the upper band's tuning 5.47"
            ),
        ),
        Band(
            most_work=576,
            tuning=Tuning(
                workgroups_per_head=2,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.KEPT_SLOT,
                lookahead=132,
                inputs_ahead=True,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 12, 16, 24, 32, 48: 6.83 8.09 11.02 "
                "14.38 20.36; the lower band's tuning 7.33 8.24 12.41 15.08 21.36; the upper band's tuning "
                "8.98 9.42 11.53 14.36 20.48"
            ),
        ),
        Band(
            most_work=None,
            tuning=Tuning(
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.KEPT_SLOT,
                lookahead=99,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 64, 128, 256, 512: 26.32 50.79 99.50 "
                "196.74; the lower band's tuning 26.57 51.15 100.38 198.70; with inputs ahead 26.36 50.77 "
                "99.58 197.14, and 96 heads x 128 rows 396.5 in place of 395.2"
            ),
        ),
    ),
}
