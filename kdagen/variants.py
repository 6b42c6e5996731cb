"""THE table: every kernel that exists. To add a head count, add one line to _HEADS and run `kdagen build`.

Each head count has one kernel for every band of batch sizes (kdagen/bands.py) of every target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdagen.bands import BANDS
from kdagen.plan import Plan, make_plan
from kdagen.spec import KernelSpec
from kdagen.target import CDNA, TARGETS, Target
from kdagen.tuning import Band, Tuning


@dataclass(frozen=True)
class Variant:
    """One row: a kernel, its target, the reason it exists (printed in the generated file) and its band."""

    spec: KernelSpec
    target: Target
    reason: str
    band: Band

    @property
    def name(self) -> str:
        """File stem, kernel symbol and test id, such as `kda_decode_h12_cdna` or `kda_decode_h12_w16_cuda`."""
        token = "" if self.band.most_work is None else f"_w{self.band.most_work}"
        return f"{self.spec.name}{token}_{self.target.name}"

    @property
    def file_name(self) -> str:
        """Name of the generated source."""
        return self.name + self.target.suffix

    @property
    def launch_symbol(self) -> str:
        """The extern "C" launcher in the generated source."""
        return self.name + "_launch"

    @property
    def tuning(self) -> Tuning:
        """What its band chose."""
        return self.band.tuning

    @property
    def plan(self) -> Plan:
        """The launch plan of this row; raises PlanError where none fits."""
        return make_plan(self.spec, self.target, self.tuning)


_HEADS: dict[int, str] = {
    4: "Kimi-Linear (32 heads) at TP 8",
    6: "Kimi-K3 (96 heads) at TP 16",
    8: "Kimi-Linear (32 heads) at TP 4; GLM-5.3-Flash at TP 8",
    12: "Kimi-K3 (96 heads) at TP 8",
    16: "Kimi-Linear (32 heads) at TP 2",
    24: "Kimi-K3 (96 heads) at TP 4",
    32: "Kimi-Linear (32 heads) at TP 1",
    48: "Kimi-K3 (96 heads) at TP 2",
    64: "KDA models of 64 heads at TP 1",
    96: "Kimi-K3 (96 heads) at TP 1",
}
"""Local head counts and who has them."""


def bands_of(num_heads: int, bands: Iterable[Band]) -> tuple[Band, ...]:
    """The bands that some batch of a head count falls into: with 96 heads, no batch has a work of 16 or less."""
    found, most_rows = [], 0
    for band in bands:
        rows = None if band.most_work is None else band.most_work // num_heads
        if rows is None or rows > most_rows:
            found.append(band)
            most_rows = rows or most_rows
    return tuple(found)


def variants_of(num_heads: int, target: Target = CDNA) -> tuple[Variant, ...]:
    """The kernels of a head count, in the table or not, by the size of the batches that they serve.

    Raises:
        SpecError: a head count that no kernel can have.
    """
    spec = KernelSpec(num_heads)
    reason = _HEADS.get(num_heads, "asked for on the command line, not in the table")
    return tuple(Variant(spec, target, reason, band) for band in bands_of(num_heads, BANDS[target.name]))


VARIANTS: tuple[Variant, ...] = tuple(
    variant for target in TARGETS for num_heads in _HEADS for variant in variants_of(num_heads, target)
)


def of_target(target: Target) -> tuple[Variant, ...]:
    """The rows of one target, by head count and size of the batches."""
    return tuple(variant for variant in VARIANTS if variant.target is target)
