"""The in-place kernel of the bench, in Triton, so that the limit is measured by the same code on every GPU."""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def scale_in_place(state, elements, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """Multiply `elements` fp32 numbers in place by a number that is 1, BLOCK of them per program.

    DEPENDENT: the next kernel may start while this one runs, and this one waits for the one before it.
    """
    if DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    tl.store(state + offsets, tl.load(state + offsets, mask=inside) * 1.0, mask=inside)
