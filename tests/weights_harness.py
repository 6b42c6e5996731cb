"""What the tests of loaders and mirrors share."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import pytest
import torch

from kdagen.errors import KdagenError


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit, NaN and signed zeros included."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def packed_param(channels: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """[3 * channels, 1, 4], poisoned."""
    return torch.nn.Parameter(torch.full((3 * channels, 1, 4), torch.nan, dtype=dtype))


def conv_mirror(channels: int) -> torch.Tensor:
    """[3, 4, channels] fp32, poisoned."""
    return torch.full((3, 4, channels), torch.nan)


def width_major(param: torch.Tensor) -> torch.Tensor:
    """What the mirror of a packed [3 * channels, 1, 4] weight must hold."""
    return torch.stack([part.squeeze(1).t().float() for part in param.detach().chunk(3)])


def raises(error: type[KdagenError], message: str) -> AbstractContextManager[pytest.ExceptionInfo[KdagenError]]:
    """Expects the error with exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")
