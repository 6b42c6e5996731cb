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
            most_work=16,
            tuning=Tuning(
                workgroups_per_head=4,
                rows_together=2,
                slice_in=SliceIn.LDS,
                next_starts=NextStarts.AFTER_PROLOGUE,
                prefetch=Prefetch.SLOT,
            ),
            reason="NVIDIA H200, 2026-12-01",
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
            reason="NVIDIA H200, 2026-12-01",
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
            reason="NVIDIA H200, 2026-12-01",
        ),
    ),
}
