"""Every error that kdagen raises: one base class and one subclass per stage.

A message is one sentence: what was expected, what came, and the repairing command where there is one.
"""

from __future__ import annotations


class KdagenError(Exception):
    """Base of every error raised by kdagen; the command line prints it without a traceback."""


class SpecError(KdagenError, ValueError):
    """What was asked for is not a kernel that can exist (a dimension, a dtype, a name)."""


class PlanError(KdagenError, ValueError):
    """No launch plan fits the asked kernel on the target."""


class TemplateError(KdagenError):
    """A template failed to render; the message names template, line and variant."""


class DriftError(KdagenError):
    """The committed sources differ from what the table and the templates give."""


class ToolchainError(KdagenError):
    """A compiler or tool is missing, or it failed its probe."""


class BuildError(KdagenError):
    """A compiler was found and failed on a generated source."""


class NoKernelError(KdagenError, LookupError):
    """No kernel exists for this layer shape and architecture."""


class NotReadyError(KdagenError, RuntimeError):
    """The op was called before it was loaded, or for the first time inside a graph capture."""


class LaunchError(KdagenError, RuntimeError):
    """The device refused a launch."""


class ArgumentError(KdagenError, ValueError):
    """An argument has the wrong dtype, rank, size, stride, alignment, device or value."""


class EmulatorError(KdagenError):
    """The emulator found the kernel doing what a GPU would have hidden (a race, a stray access ...)."""


class WeightDTypeError(KdagenError, TypeError):
    """A checkpoint tensor's dtype cannot be taken as values, or its parameter's dtype cannot hold them."""
