"""Fused decode kernels for Kimi Delta Attention, their generator, and the torch op that calls them.

Importing this package does nothing else: no torch, no build, no file. What it names is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdagen.dispatch import find, is_fused_kda_decode_supported, why_unsupported
    from kdagen.op import fused_kda_decode, is_loaded, load, prepare
    from kdagen.spec import LayerShape
    from kdagen.weights import (
        StagedWeights,
        make_decode_conv1d_weight_loader,
        make_decode_norm_weight_loader,
        shard_A_log,
        shard_dt_bias,
        stage,
    )

_HOME = {
    "LayerShape": "spec",
    "find": "dispatch",
    "fused_kda_decode": "op",
    "is_fused_kda_decode_supported": "dispatch",
    "is_loaded": "op",
    "load": "op",
    "make_decode_conv1d_weight_loader": "weights",
    "make_decode_norm_weight_loader": "weights",
    "prepare": "op",
    "shard_A_log": "weights",
    "shard_dt_bias": "weights",
    "stage": "weights",
    "StagedWeights": "weights",
    "why_unsupported": "dispatch",
}

__all__ = [
    "LayerShape",
    "StagedWeights",
    "find",
    "fused_kda_decode",
    "is_fused_kda_decode_supported",
    "is_loaded",
    "load",
    "make_decode_conv1d_weight_loader",
    "make_decode_norm_weight_loader",
    "prepare",
    "shard_A_log",
    "shard_dt_bias",
    "stage",
    "why_unsupported",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kdagen' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kdagen.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
