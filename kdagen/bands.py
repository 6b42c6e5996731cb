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
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 1, 2: 2.09 2.40; the upper band's "
                "tuning 2.36 2.47"
            ),
        ),
        Band(
            most_work=36,
            tuning=Tuning(
                min_waves_per_simd=6,
                workgroups_per_head=2,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 3: 2.76; the lower band's tuning "
                "3.12; the upper band's tuning 2.94"
            ),
        ),
        Band(
            most_work=192,
            tuning=Tuning(
                min_waves_per_simd=6,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.KEPT_SLOT,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 4, 6, 8, 12, 16: 3.13 3.77 4.54 7.10 "
                "8.12; the lower band's tuning 3.16 4.20 4.70 7.47 8.55; the upper band's tuning 3.40 4.71 "
                "5.47 6.98 8.29"
            ),
        ),
        Band(
            most_work=576,
            tuning=Tuning(
                workgroups_per_head=2,
                rows_together=2,
                slice_in=SliceIn.LDS,
                prefetch=Prefetch.SLOT,
                lookahead=132,
            ),
            reason=(
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 24, 32, 48: 11.35 14.52 20.98; the "
                "lower band's tuning 12.80 16.68 23.68; the upper band's tuning 11.96 14.94 21.43"
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
                "NVIDIA H200, 2026-12-02, us a layer at 12 heads, rows 64, 128, 256, 512: 27.00 51.59 "
                "100.36 198.03; the lower band's tuning 27.37 52.58 103.49 205.78"
            ),
        ),
    ),
}
