"""What crosses a language: the launch parameters, as one table for C and Python, and the schema of the torch op."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """One field of the launch parameters; strides count elements, not bytes."""

    name: str
    c_type: str
    doc: str

    @property
    def is_pointer(self) -> bool:
        """Whether the field is a device address."""
        return self.c_type.endswith("*")

    @property
    def declaration(self) -> str:
        """The field as C declares it, without the semicolon."""
        return self.c_type + ("" if self.is_pointer else " ") + self.name


STRUCT_NAME = "KdaDecodeParams"

PARAMS: tuple[Param, ...] = (
    Param("x", "const bf16_t *", "[rows, 3 * heads * dim], packed q, k, v"),
    Param("weight", "const float *", "[3, taps, heads * dim]"),
    Param("bias", "const float *", "[3 * heads * dim] or null"),
    Param("conv_state", "bf16_t *", "[slots, 3 * heads * dim, taps - 1], updated"),
    Param("raw_g", "const bf16_t *", "[rows, heads, dim]"),
    Param("raw_beta", "const bf16_t *", "[rows, heads]"),
    Param("A_log", "const float *", "[heads]"),
    Param("dt_bias", "const float *", "[heads, dim]"),
    Param("state_indices", "const int *", "[rows]"),
    Param("state", "float *", "[slots, heads, dim (v), dim (k)], updated"),
    Param("out", "bf16_t *", "[rows, heads, dim], written"),
    Param("output_gate", "const bf16_t *", "[rows, heads, dim]; null with norm_weight"),
    Param("norm_weight", "const float *", "[dim]; null: no output norm"),
    Param("x_row_stride", "long long", "elements"),
    Param("conv_slot_stride", "long long", "elements"),
    Param("raw_g_row_stride", "long long", "elements"),
    Param("raw_beta_row_stride", "long long", "elements"),
    Param("index_stride", "long long", "elements"),
    Param("state_slot_stride", "long long", "elements"),
    Param("out_row_stride", "long long", "elements"),
    Param("output_gate_row_stride", "long long", "elements"),
    Param("first_row", "long long", "row of workgroup 0, set by the launcher"),
    Param("rows", "long long", "rows in the batch, 0 or more"),
    Param("first_live_slot", "int", "a row with a slot below it is null"),
    Param("live_slots", "int", "slots from first_live_slot on, 0 or more"),
    Param("bounded_gate", "int", "1: bounded decay gate, 0: softplus"),
    Param("conv_ds", "int", "1: conv slot is [channel, tap], 0: [tap, channel]"),
    Param("lower_bound", "float", "of the bounded gate, below 0"),
    Param("norm_eps", "float", "added to the mean square"),
)

_CTYPES: dict[str, type[ctypes._SimpleCData]] = {  # type: ignore[type-arg]
    "long long": ctypes.c_longlong,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
}


class KdaDecodeParams(ctypes.Structure):
    """The same struct as the generated C text declares, for callers in Python."""

    _fields_ = [(p.name, ctypes.c_void_p if p.is_pointer else _CTYPES[p.c_type]) for p in PARAMS]


OP_NAME = "fused_kda_decode"

OP_SCHEMA = (
    f"{OP_NAME}(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor raw_g, Tensor raw_beta, "
    "Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor(b!) state, Tensor(c!) out, float? lower_bound=None, "
    "Tensor? output_gate=None, Tensor? norm_weight=None, float norm_eps=1e-05, int first_live_slot=1) -> ()"
)
"""Schema of torch.ops.kdagen.fused_kda_decode: conv_state, state and out are written, nothing is returned."""
