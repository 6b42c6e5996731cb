"""Which tuning serves which batches, by target: that with the least limit that rows * heads do not pass.

`kdagen bench --tune FILE` times candidates on the GPU that is here, and writes this file with its target's bands new.
"""

from kdagen.tuning import Band, NextStarts, Prefetch, SliceIn, Tuning

BANDS: dict[str, tuple[Band, ...]] = {
    "cdna": (
        Band(
            most_work=None,
            tuning=Tuning(),
            reason="not measured, no AMD GPU was at hand: the fewest instructions that keep four waves per SIMD",
        ),
    ),
    "cuda": (
        Band(
            most_work=12,
            tuning=Tuning(
                workgroups_per_head=4,
                rows_together=2,
                slice_in=SliceIn.LDS,
                next_starts=NextStarts.AFTER_PROLOGUE,
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
                next_starts=NextStarts.AFTER_PROLOGUE,
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
                next_starts=NextStarts.AT_ONCE,
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
