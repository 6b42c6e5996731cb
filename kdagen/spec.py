"""What is asked for: frozen specs of enums and ints, and the name tokens made of them."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from kdagen.errors import SpecError


class DType(enum.Enum):
    """Element types, by the token that names use."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return {DType.BF16: 2, DType.FP32: 4}[self]


class Gate(enum.Enum):
    """Form of the decay gate. BOUNDED: exp(lower_bound * sigmoid(z)); SOFTPLUS: exp(-exp(A_log) * softplus(g))."""

    BOUNDED = "bounded"
    SOFTPLUS = "softplus"


class OutputNorm(enum.Enum):
    """Whether the gated RMSNorm is applied to the output."""

    GATED = "norm"
    NONE = "nonorm"


class ConvLayout(enum.Enum):
    """Memory order of one slot of the conv state. SD: [tap, channel], DS: [channel, tap]; the last is fastest."""

    SD = "sd"
    DS = "ds"


@dataclass(frozen=True)
class Instance:
    """One instantiation inside a generated file: what a single layer asks for."""

    gate: Gate
    output_norm: OutputNorm
    conv_layout: ConvLayout

    @property
    def name(self) -> str:
        """Token such as `bounded-norm-sd`."""
        return f"{self.gate.value}-{self.output_norm.value}-{self.conv_layout.value}"

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """The kernel's template arguments: bounded gate, output norm, DS conv state."""
        return (
            self.gate is Gate.BOUNDED,
            self.output_norm is OutputNorm.GATED,
            self.conv_layout is ConvLayout.DS,
        )


INSTANCES: tuple[Instance, ...] = tuple(
    Instance(gate, norm, layout) for gate, norm, layout in itertools.product(Gate, OutputNorm, ConvLayout)
)
"""Every instance of a generated file, in the order in which it appears there."""


@dataclass(frozen=True)
class KernelSpec:
    """Dimensions and dtypes of one fused decode kernel (one token per row).

    Attributes:
        num_heads: heads on this rank (after tensor-parallel sharding), 1 or more.
        head_dim: channels per head, of keys and values alike; 128.
        conv_width: taps of the causal conv1d; 4 (three of history and the new token).
        input_dtype: dtype of x, raw_g, raw_beta, output_gate and out.
        conv_state_dtype: dtype of the conv window; a bit-exact copy of x.
        state_dtype: dtype of the recurrent state.

    Raises:
        SpecError: a field has a value that no kernel supports.
    """

    num_heads: int
    head_dim: int = 128
    conv_width: int = 4
    input_dtype: DType = DType.BF16
    conv_state_dtype: DType = DType.BF16
    state_dtype: DType = DType.FP32

    def __post_init__(self) -> None:
        if not isinstance(self.num_heads, int) or not 1 <= self.num_heads <= MAX_HEADS:
            raise SpecError(f"num_heads: expected an int from 1 to {MAX_HEADS}, got {self.num_heads!r}")
        supported = {
            "head_dim": 128,
            "conv_width": 4,
            "input_dtype": DType.BF16,
            "conv_state_dtype": DType.BF16,
            "state_dtype": DType.FP32,
        }
        for field, expected in supported.items():
            value = getattr(self, field)
            if value != expected:
                raise SpecError(f"{field}: expected {_shown(expected)}, the only one supported, got {_shown(value)}")

    @property
    def name(self) -> str:
        """Name stem such as `kda_decode_h12`; fields that have one legal value carry no token."""
        return f"kda_decode_h{self.num_heads}"

    @property
    def state_bytes(self) -> int:
        """Bytes of one head's state slice, read once and written once per row."""
        return self.head_dim * self.head_dim * self.state_dtype.bytes


@dataclass(frozen=True)
class LayerShape:
    """What a layer is, as far as the choice of a kernel goes: the exact key of dispatch. Values are not checked here.

    Attributes:
        num_heads: heads on this rank.
        head_dim: channels per head, keys and values alike.
        conv_width: taps of the causal conv1d.
        num_spec: speculative tokens per request beside the one decoded; kernels of this version take 0.
        input_dtype: dtype of x, the gates and out; any hashable, a DType or what a framework calls it.
        conv_state_dtype: dtype of the conv window.
        state_dtype: dtype of the recurrent state.
        conv_layout: layout of a conv cache slot.
    """

    num_heads: int
    head_dim: int = 128
    conv_width: int = 4
    num_spec: int = 0
    input_dtype: DType | str = DType.BF16
    conv_state_dtype: DType | str = DType.BF16
    state_dtype: DType | str = DType.FP32
    conv_layout: ConvLayout = ConvLayout.SD


MAX_HEADS = 1024
"""Largest head count taken; beyond it a typing error is likelier than a model."""


def _shown(value: object) -> str:
    return value.value if isinstance(value, enum.Enum) else repr(value)
