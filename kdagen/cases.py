"""Test cases of a decode call: what varies, how a case is written on one line, and the op arguments that it makes."""

from __future__ import annotations

import dataclasses
import enum
import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch

from kdagen.errors import SpecError
from kdagen.spec import INSTANCES, ConvLayout, Gate, OutputNorm

DIM, TAPS = 128, 4
_BF16 = torch.bfloat16


class NullRows(enum.Enum):
    """Which rows name no live slot. PADDING: the last half, slot 0; MIXED: below, above and far outside the pool."""

    NONE = "live"
    PADDING = "padding"
    MIXED = "mixed"
    ALL = "allnull"


class Strides(enum.Enum):
    """DENSE: contiguous. PAGED: both pools cut from one page per slot. WIDE: x, gates and beta are columns of one
    projection with odd row stride, out of another, indices of a block table. FAR: pools past 2^31 elements, sparse in
    memory."""

    DENSE = "dense"
    PAGED = "paged"
    WIDE = "wide"
    FAR = "far"


class Values(enum.Enum):
    """UNIT: unit scale. TINY: q and k near the L2 norm's eps. HOSTILE: large, saturating, zero and subnormal values."""

    UNIT = "unit"
    TINY = "tiny"
    HOSTILE = "hostile"


@dataclass(frozen=True)
class Case:
    """One call of the op, made of a seed. `token()` writes it on one line and `parse()` reads it back."""

    num_heads: int
    rows: int
    gate: Gate
    output_norm: OutputNorm
    conv_layout: ConvLayout
    bias: bool = True
    null_rows: NullRows = NullRows.NONE
    strides: Strides = Strides.DENSE
    values: Values = Values.UNIT
    first_live_slot: int = 1
    seed: int = 0

    def token(self) -> str:
        """Such as `h12-b3-bounded-norm-sd-bias-mixed-paged-unit-f1-s7`."""
        names = (self.gate, self.output_norm, self.conv_layout)
        return "-".join(
            (
                f"h{self.num_heads}",
                f"b{self.rows}",
                *(name.value for name in names),
                "bias" if self.bias else "nobias",
                *(name.value for name in (self.null_rows, self.strides, self.values)),
                f"f{self.first_live_slot}",
                f"s{self.seed}",
            )
        )

    @staticmethod
    def parse(token: str) -> Case:
        """The case that `token()` wrote; raises SpecError with the grammar for anything else."""
        try:
            h, b, gate, norm, layout, bias, null, strides, values, first, seed = token.split("-")
            case = Case(
                int(h[1:]),
                int(b[1:]),
                Gate(gate),
                OutputNorm(norm),
                ConvLayout(layout),
                {"bias": True, "nobias": False}[bias],
                NullRows(null),
                Strides(strides),
                Values(values),
                int(first[1:]),
                int(seed[1:]),
            )
        except (ValueError, KeyError):
            case = None
        if case is None or case.token() != token:
            example = Case(12, 3, Gate.BOUNDED, OutputNorm.GATED, ConvLayout.SD).token()
            raise SpecError(f"case: expected a token such as {example}, got {token!r}")
        return case

    @property
    def slots(self) -> int:
        """Slots of both pools: one for each row, two spare, and the padding below the first live one."""
        if self.strides is Strides.FAR:
            return 2**31 // (self.num_heads * DIM * DIM) + 2
        return self.first_live_slot + self.rows + 2

    def indices(self) -> list[int]:
        """The slot of every row; live ones are distinct."""
        g = torch.Generator().manual_seed(self.seed)
        if self.strides is Strides.FAR:
            slots = list(range(self.slots - self.rows, self.slots))
        else:
            slots = (self.first_live_slot + torch.randperm(self.rows + 2, generator=g)[: self.rows]).tolist()
        outside = {
            NullRows.NONE: [],
            NullRows.PADDING: [0] * (self.rows // 2),
            NullRows.MIXED: [self.first_live_slot - 1, self.slots, 2**31 - 1, -(2**31)][: max(0, self.rows - 1)],
            NullRows.ALL: [self.slots if row % 2 else -1 for row in range(self.rows)],
        }[self.null_rows]
        if self.null_rows is NullRows.PADDING and self.first_live_slot == 0:
            outside = [-1] * len(outside)
        return slots[: self.rows - len(outside)] + outside

    def live(self) -> tuple[list[int], list[int]]:
        """The rows that name a live slot, and those slots."""
        rows = [(r, s) for r, s in enumerate(self.indices()) if self.first_live_slot <= s < self.slots]
        return [row for row, _ in rows], [slot for _, slot in rows]

    def emulator_settings(self) -> dict[str, Any]:
        """Settings of the emulator that the seed chooses: the order of lanes and the errors of the hardware's math."""
        return {"lane_order_seed": self.seed or None, "math_seed": self.seed}

    def arguments(self) -> dict[str, Any]:
        """The op's keyword arguments; what no row names is NaN, as is `out`."""
        return _Maker(self).arguments()


class _Maker:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)

    def normal(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=self.generator) * scale

    def arguments(self) -> dict[str, Any]:
        case = self.case
        rows, heads, channels = case.rows, case.num_heads, case.num_heads * DIM
        norm = case.output_norm is OutputNorm.GATED
        x, gate, beta = self.normal(rows, 3 * channels), self.normal(rows, channels), self.normal(rows, heads)
        raw_g, bias = self.normal(1, rows, heads, DIM), self.normal(3 * channels, scale=0.1)
        weight = self.normal(3, TAPS, channels, scale=0.5)
        state, conv = self.pools()
        if case.values is Values.TINY:
            x, bias = x * 1e-3, bias * 1e-3
            conv[case.live()[1]] *= 1e-3
        if case.values is Values.HOSTILE:
            x, gate, beta, raw_g = (self.hostile(a) for a in (x, gate, beta, raw_g))
        x, gate, beta, g = self.placed(*(a.to(_BF16) for a in (x, gate, beta, raw_g.view(rows, channels))))
        return {
            "x": x,
            "weight": weight,
            "bias": bias if case.bias else None,
            "conv_state": conv,
            "raw_g": g.view(1, rows, heads, DIM),
            "raw_beta": beta.unsqueeze(0),
            "A_log": torch.rand(heads, generator=self.generator).mul(15).add(1).log(),
            "dt_bias": self.normal(channels) - (0.0 if case.gate is Gate.BOUNDED else 3.0),
            "state_indices": self.placed_indices(),
            "state": state,
            "out": self.placed(torch.full((rows, channels), math.nan, dtype=_BF16))[0].view(1, rows, heads, DIM),
            "lower_bound": -5.0 if case.gate is Gate.BOUNDED else None,
            "output_gate": gate.view(rows, heads, DIM) if norm else None,
            "norm_weight": 1 + self.normal(DIM, scale=0.1) if norm else None,
            "first_live_slot": case.first_live_slot,
        }

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """state [slots, H, D, D] and conv_state [slots, 3*H*D, 3]; NaN outside the live slots."""
        case = self.case
        heads, packed = case.num_heads, 3 * case.num_heads * DIM
        state_size, conv_size = heads * DIM * DIM, packed * (TAPS - 1)
        state_stride, conv_stride, offset = state_size, conv_size, 0
        if case.strides is Strides.PAGED:  # a page: the state, the window, 64 bytes of padding
            state_stride = state_size + conv_size // 2 + 16
            conv_stride, offset = 2 * state_stride, 2 * state_size
        far = case.strides is Strides.FAR
        buffer = _sparse(case.slots * state_stride) if far else torch.full((case.slots * state_stride,), math.nan)
        conv_buffer = buffer.view(_BF16) if offset else _sparse(case.slots * conv_stride // 2 + 1).view(_BF16)
        state = buffer.as_strided((case.slots, heads, DIM, DIM), (state_stride, DIM * DIM, DIM, 1))
        taps = (TAPS - 1, 1) if case.conv_layout is ConvLayout.DS else (1, packed)
        conv = conv_buffer.as_strided((case.slots, packed, TAPS - 1), (conv_stride, *taps), offset)
        if not far:
            conv.fill_(math.nan)
        for slot in case.live()[1]:
            state[slot] = self.normal(heads, DIM, DIM)
            conv[slot] = self.normal(packed, TAPS - 1).to(_BF16)
        return state, conv

    def placed(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """bf16 parts [rows, width], where the strides ask for it as columns of one buffer with NaN between them."""
        if self.case.strides is not Strides.WIDE:
            return list(parts)
        gap = 127  # odd, so that parts and rows start at odd elements too
        wide = torch.full((self.case.rows, sum(part.size(1) + gap for part in parts) | 1), math.nan, dtype=_BF16)
        views, start = [], 0
        for part in parts:
            views.append(wide[:, start : start + part.size(1)].copy_(part))
            start += part.size(1) + gap
        return views

    def placed_indices(self) -> torch.Tensor:
        """[rows] int32; a column of a table, where the strides ask for it, whose others name a spare slot of NaN."""
        case = self.case
        indices = torch.tensor(case.indices(), dtype=torch.int32)
        if case.strides is not Strides.WIDE:
            return indices
        spare = next(slot for slot in range(case.first_live_slot, case.slots) if slot not in case.live()[1])
        table = torch.full((case.rows, 3), spare, dtype=torch.int32)
        table[:, 0] = indices
        return table[:, 0]

    def hostile(self, values: torch.Tensor) -> torch.Tensor:
        """Every eighth value each: large, negative large, zero, subnormal in bf16; the rest as it is."""
        kind = torch.randint(0, 8, values.shape, generator=self.generator)
        for which, value in enumerate((30.0, -30.0, 0.0, 1e-39)):
            values = torch.where(kind == which, torch.tensor(value), values)
        return values


def _sparse(elements: int) -> torch.Tensor:
    """fp32 zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 4 * elements, flags=flags), dtype=torch.float32)


def matrix(num_heads: int, *, quick: bool) -> list[Case]:
    """The cases that `kdagen verify` runs: every instance with everything else varied, then what is special."""
    cycle_nulls, cycle_strides = (NullRows.MIXED, NullRows.NONE, NullRows.PADDING), (Strides.PAGED, Strides.WIDE)
    cases = [
        Case(
            num_heads,
            2 + number % 3,
            instance.gate,
            instance.output_norm,
            instance.conv_layout,
            bias=number % 4 != 1,
            null_rows=cycle_nulls[number % 3],
            strides=cycle_strides[number % 2],
            first_live_slot=(1, 0)[number // 4 % 2],
            seed=number,
        )
        for number, instance in enumerate(INSTANCES)
    ]
    if quick:
        return cases
    plain = Case(num_heads, 1, Gate.BOUNDED, OutputNorm.GATED, ConvLayout.SD)
    softplus = dataclasses.replace(plain, gate=Gate.SOFTPLUS, output_norm=OutputNorm.NONE, conv_layout=ConvLayout.DS)
    special: list[dict[str, Any]] = [
        {"rows": 0},
        {"rows": 3, "null_rows": NullRows.ALL, "seed": 1},
        {"values": Values.TINY, "seed": 2},
        {"values": Values.HOSTILE, "rows": 2, "seed": 3},
        {"strides": Strides.FAR, "seed": 4},
    ]
    return cases + [dataclasses.replace(base, **changes) for changes in special for base in (plain, softplus)]
