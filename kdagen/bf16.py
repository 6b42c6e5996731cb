"""The one rounding to bf16 that torch does not have: from fp64 in one step."""

from __future__ import annotations

import torch


def rounded_to_bf16(a: torch.Tensor) -> torch.Tensor:
    """The nearest bf16 (ties to even) of an fp32 or fp64 tensor, same shape.

    torch converts fp64 by way of fp32, whose rounding makes a tie of one value in 65,536; such a value is moved back to
    its side of the tie.
    """
    single = a.to(torch.float32)
    made_a_tie = ((single.view(torch.int32) & 0xFFFF) == 0x8000) & (single != a)
    side = torch.where(a > single, torch.inf, -torch.inf).to(torch.float32)
    return torch.where(made_a_tie, torch.nextafter(single, side), single).to(torch.bfloat16)
