"""The command line: parse, call, print. Exit codes: 0 success, 1 a check failed, 2 the request was wrong."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kdagen import commands
from kdagen.errors import KdagenError, SpecError

_DESCRIPTION = """\
kdagen renders, checks and proves fused KDA decode kernels: one launch for the conv1d update, the gated
delta rule and the gated RMSNorm of one token per sequence."""

_EPILOG = """\
examples:
  kdagen list                        the kernels that exist
  kdagen verify --heads 12 --quick   run one kernel lane by lane on this CPU against the oracle
  kdagen build                       render every kernel of the table into generated/
  kdagen build --check               prove that generated/ is what the table and the templates give
  kdagen build --heads 20 --out DIR  render a head count that is not in the table
  kdagen build --arch gfx942         with a ROCm build of torch: also compile the torch op
  kdagen build --code-objects DIR    without one: compile the device code alone
  kdagen inspect                     compile for every AMD GPU and audit the machine code
  kdagen inspect --diff HEAD~1       what a change did to it
  kdagen bench --heads 12            time per layer on the GPU that is here
  kdagen doctor                      which compilers are here, and what to install"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and never raises for a user's error."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SpecError as error:
        print(f"kdagen: {error}", file=sys.stderr)
        return 2
    except KdagenError as error:
        print(f"kdagen: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kdagen: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kdagen", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    build = subparsers.add_parser(
        "build",
        help="render the kernels of the table, or check that they are up to date",
        description="Render every kernel of the table into generated/: write what changed, remove orphans. With a "
        "torch that runs them, also compile them into the torch op; without one, say so.",
    )
    build.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print every difference as a diff and exit 1 if there is one",
    )
    build.add_argument(
        "--heads",
        type=_counts,
        metavar="N[,N...]",
        help="render these head counts alone, in the table or not; needs --out",
    )
    build.add_argument("--out", type=Path, metavar="DIR", help="folder to write to or check (default: generated/)")
    build.add_argument(
        "--arch",
        type=_archs,
        default=(),
        metavar="ARCH[,ARCH...]",
        help="architectures to compile for (default: torch's own variable, else those of the visible GPUs)",
    )
    build.add_argument(
        "--code-objects",
        type=Path,
        metavar="DIR",
        help="compile device code alone into DIR with any compiler that is here (default: for every AMD architecture)",
    )
    build.set_defaults(run=commands.build)

    listing = subparsers.add_parser(
        "list", help="the kernels that exist, with launch shapes", description="Print the table of kernels."
    )
    listing.set_defaults(run=commands.list_kernels)

    verify = subparsers.add_parser(
        "verify",
        help="run kernels lane by lane on this CPU and compare them with the fp64 oracle",
        description="Run every kernel's generated text on the CPU emulator over a matrix of cases (features, batches, "
        "null rows, strides, hostile values) and compare it with the fp64 oracle. Exit 1 on any failure, with "
        "the first failing case as a command that reproduces it alone.",
    )
    verify.add_argument("--heads", type=_counts, metavar="N[,N...]", help="these head counts only, in the table or not")
    verify.add_argument("--quick", action="store_true", help="a short matrix: every feature once")
    verify.add_argument("--case", metavar="TOKEN", help="this one case, as a failure prints it")
    verify.add_argument("--source", type=Path, metavar="FILE", help="a source to run in place of the rendered text")
    verify.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    verify.set_defaults(run=commands.verify)

    inspect = subparsers.add_parser(
        "inspect",
        help="compile for AMD GPUs, read the machine code back and audit it",
        description="Compile the device code of generated/ and read it back: registers, LDS, spills, occupancy, "
        "instructions by class, memory accesses by width and cache policy, waits, and the cycles of llvm-mca's model. "
        "Then hold every instance to the rules of kdagen/audit.py; exit 1 if one is broken, with the instructions that "
        "break it. Needs clang and LLVM's tools (`kdagen doctor`), no GPU. Results are cached by source and compiler.",
        epilog="examples:\n"
        "  kdagen inspect --heads 12 --arch gfx942\n"
        "  kdagen inspect --heads 12 --arch gfx942 --source | less\n"
        "  kdagen inspect --heads 12 --diff HEAD~1",
        formatter_class=raw,
    )
    inspect.add_argument(
        "--heads", type=_counts, metavar="N[,N...]", help="these head counts only (default: the table)"
    )
    inspect.add_argument(
        "--arch", type=_archs, default=(), metavar="ARCH[,ARCH...]", help="architectures (default: gfx942,gfx950)"
    )
    inspect.add_argument("--instance", metavar="NAME", help="this instance only, such as bounded-norm-sd")
    inspect.add_argument("--json", type=Path, metavar="FILE", help="also write every figure and broken rule as JSON")
    different = inspect.add_mutually_exclusive_group()
    different.add_argument("--diff", metavar="REV", help="print only what differs from the sources of a git revision")
    different.add_argument(
        "--source",
        action="store_true",
        help="print the disassembly of one instance (default: bounded-norm-sd) with stages and source lines marked; "
        "needs one of --heads and of --arch",
    )
    inspect.set_defaults(run=commands.inspect)

    bench = subparsers.add_parser(
        "bench",
        help="time per layer on the GPU that is here, beside the best in-place kernel on the same bytes",
        description="Time the op under graph replay over a ring of layers whose state does not fit the last-level "
        "cache, and in the same run the best in-place kernel on the same bytes (the limit), a copy, a warm state, and "
        "the peers that are here: fla-core's chain of Triton kernels if installed, vLLM's kernels with --vllm-src.",
    )
    bench.add_argument("--heads", type=_counts, metavar="N[,N...]", help="local head counts (default: 12,24,48,96)")
    bench.add_argument("--rows", type=_counts, metavar="B[,B...]", help="batch sizes (default: 1,2,4,...,256)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write every timing with device and versions")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="also draw time and share of the limit as PNG")
    bench.add_argument(
        "--vllm-src",
        type=Path,
        metavar="DIR",
        help="vLLM's source tree: also time its fused kernel, built with vLLM's flags, and its chain of Triton kernels",
    )
    bench.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="instead, time the candidate tunings by batch size, and write the bands to FILE (kdagen/bands.py); "
        "then `kdagen build`",
    )
    bench.set_defaults(run=commands.bench)

    doctor = subparsers.add_parser(
        "doctor",
        help="which compilers and tools are here, tried on a real kernel, and what to install",
        description="Find every tool for every target, try it on a small kernel and say what to install if it fails.",
    )
    doctor.set_defaults(run=commands.doctor)
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected counts such as 12 or 12,24, got {text!r}") from None


def _archs(text: str) -> tuple[str, ...]:
    return tuple(arch for arch in re.split("[,;]", text) if arch)
