"""THE table: every kernel that exists. To add a head count, add one line to _HEADS and run `kdagen build`."""

from __future__ import annotations

from dataclasses import dataclass

from kdagen.plan import DEFAULT_TUNING, Plan, Tuning, make_plan
from kdagen.spec import KernelSpec
from kdagen.target import CDNA, TARGETS, Target


@dataclass(frozen=True)
class Variant:
    """One row: a kernel, its target, its tuning and the reason it exists (printed in the generated file)."""

    spec: KernelSpec
    target: Target
    reason: str
    tuning: Tuning = DEFAULT_TUNING

    @property
    def name(self) -> str:
        """File stem, kernel symbol and test id, such as `kda_decode_h12_cdna`."""
        return f"{self.spec.name}_{self.target.name}"

    @property
    def file_name(self) -> str:
        """Name of the generated source."""
        return self.name + self.target.suffix

    @property
    def launch_symbol(self) -> str:
        """The extern "C" launcher in the generated source."""
        return self.name + "_launch"

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
"""Local head counts and who has them; each is one kernel for every target."""

VARIANTS: tuple[Variant, ...] = tuple(
    Variant(KernelSpec(num_heads), target, reason) for target in TARGETS for num_heads, reason in _HEADS.items()
)


def of_target(target: Target) -> tuple[Variant, ...]:
    """The rows of one target, by head count."""
    return tuple(variant for variant in VARIANTS if variant.target is target)


def on_demand(num_heads: int, target: Target = CDNA) -> Variant:
    """A row for a head count, from the table if it is there; raises SpecError for one that cannot exist."""
    for variant in VARIANTS:
        if variant.spec.num_heads == num_heads and variant.target is target:
            return variant
    return Variant(KernelSpec(num_heads), target, "asked for on the command line, not in the table")
