"""The command line: parse, call, print. Exit codes: 0 success, 1 a check failed, 2 the request was wrong."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kdagen import emit
from kdagen.errors import DriftError, KdagenError, SpecError
from kdagen.paths import generated_dir
from kdagen.spec import INSTANCES
from kdagen.table import aligned
from kdagen.target import CDNA, TARGETS, Target, target_of
from kdagen.variants import VARIANTS, Variant, variants_of

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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser(
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
    build.set_defaults(run=_build)

    listing = commands.add_parser(
        "list", help="the kernels that exist, with launch shapes", description="Print the table of kernels."
    )
    listing.set_defaults(run=_list)

    verify = commands.add_parser(
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
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser(
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
    inspect.set_defaults(run=_inspect)

    bench = commands.add_parser(
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
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser(
        "doctor",
        help="which compilers and tools are here, tried on a real kernel, and what to install",
        description="Find every tool for every target, try it on a small kernel and say what to install if it fails.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected counts such as 12 or 12,24, got {text!r}") from None


def _archs(text: str) -> tuple[str, ...]:
    return tuple(arch for arch in re.split("[,;]", text) if arch)


def _variants(heads: tuple[int, ...] | None, targets: Sequence[Target] = TARGETS) -> list[Variant]:
    chosen = [variant for variant in VARIANTS if variant.target in targets]
    if heads is None:
        return chosen
    return [variant for target in targets for count in heads for variant in variants_of(count, target)]


def _build(arguments: argparse.Namespace) -> int:
    if arguments.heads is not None and arguments.out is None:
        raise SpecError("--out: expected a folder with --heads, got none; add `--out DIR`")
    folder = arguments.out or generated_dir()
    chosen = arguments.heads
    texts = emit.render_all() if chosen is None else emit.render_kernels(_variants(chosen))
    if arguments.check:
        _check(folder, texts, arguments)
        return 0
    done = emit.write(folder, texts, remove_orphans=arguments.out is None)
    for name in done.changed:
        print(f"wrote    {folder / name}")
    for name in done.removed:
        print(f"removed  {folder / name}")
    counts = f"{len(done.changed)} written, {len(done.unchanged)} up to date, {len(done.removed)} removed"
    print(f"{len(texts)} files: {counts}")
    if arguments.code_objects is not None:
        _code_objects(texts, arguments)
    elif chosen is None and arguments.out is None:
        _compile(arguments)
    return 0


def _code_objects(texts: dict[str, str], arguments: argparse.Namespace) -> None:
    from kdagen import build

    for target in {target_of(arch).name: target_of(arch) for arch in arguments.arch or CDNA.archs}.values():
        archs = [arch for arch in arguments.arch or CDNA.archs if arch in target.archs]
        kernels = {name: text for name, text in texts.items() if name.endswith(target.suffix)}
        made = build.code_objects(kernels, target, archs, arguments.code_objects)
        print(f"{len(made)} code objects for {', '.join(archs)} in {arguments.code_objects}")


def _compile(arguments: argparse.Namespace) -> None:
    from kdagen import build, op

    target = build.torch_target()
    if target is None:
        print(
            f"not compiled: torch {build.torch_version()} is not a ROCm build and sees no GPU; "
            "`kdagen build --code-objects DIR` compiles device code alone"
        )
        return
    archs = build.resolve_archs(target, arguments.arch)
    print(f"compiled for {', '.join(archs)}: {build.build(op.table_request(target, archs))}")


def _check(folder: Path, texts: dict[str, str], arguments: argparse.Namespace) -> None:
    drifts = emit.check(folder, texts)
    if not drifts:
        print(f"{len(texts)} files in {folder} are what the table and the templates give")
        return
    for drift in drifts:
        print(f"{drift.name}: {drift.kind.value}")
        if drift.diff:
            print(drift.diff, end="")
    repair = [emit.REPAIR]
    if arguments.heads is not None:
        repair.append("--heads " + ",".join(str(count) for count in arguments.heads))
    if arguments.out is not None:
        repair.append(f"--out {arguments.out}")
    sys.stdout.flush()
    raise DriftError(
        f"{len(drifts)} files of {folder} differ from the table and the templates; run `{' '.join(repair)}`"
    )


def _list(arguments: argparse.Namespace) -> int:
    rows = [
        (
            variant.name,
            str(variant.spec.num_heads),
            "any" if variant.band.most_work is None else str(variant.band.most_work // variant.spec.num_heads),
            ",".join(variant.target.archs),
            f"rows*{variant.spec.num_heads * variant.tuning.workgroups_per_head} x {variant.plan.threads}",
            str(variant.plan.lds_bytes),
            str(variant.plan.max_vgprs),
            variant.reason,
        )
        for variant in VARIANTS
    ]
    header = ("variant", "heads", "rows <=", "archs", "grid x threads", "LDS B", "registers <=", "serves")
    print(aligned(header, rows, right=(1, 2, 5, 6)))
    print(f"\nEach has {len(INSTANCES)} instances: " + ", ".join(instance.name for instance in INSTANCES))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from kdagen import verify

    return verify.main_report(
        _variants(arguments.heads, (CDNA,)),
        quick=arguments.quick,
        token=arguments.case,
        source=arguments.source,
        json_path=arguments.json,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.source:
        from kdagen import inspect_source

        if arguments.json is not None:
            raise SpecError(f"--json: expected none with --source, got {arguments.json}")
        return inspect_source.main_report(arguments.heads, arguments.arch, arguments.instance)
    from kdagen import inspect_code

    return inspect_code.main_report(
        arguments.heads,
        arguments.arch,
        instance=arguments.instance,
        json_path=arguments.json,
        revision=arguments.diff,
    )


def _bench(arguments: argparse.Namespace) -> int:
    from kdagen import bench

    heads, rows = arguments.heads or bench.DEFAULT_HEADS, arguments.rows or bench.DEFAULT_ROWS
    if min(rows) < 1:
        raise SpecError(f"--rows: expected batch sizes of 1 or more, got {min(rows)}")
    if arguments.tune is not None:
        from kdagen import bench_tune

        return bench_tune.main_report(arguments.tune, arguments.heads, arguments.rows)
    return bench.main_report(heads, rows, arguments.json, arguments.plot, arguments.vllm_src)


def _doctor(arguments: argparse.Namespace) -> int:
    from kdagen import doctor

    return doctor.main_report(sys.stdout)
