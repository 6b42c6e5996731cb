"""What each command of the command line does with its arguments; `kdagen.cli` parses them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kdagen import emit
from kdagen.errors import DriftError, SpecError
from kdagen.paths import generated_dir
from kdagen.spec import INSTANCES
from kdagen.table import aligned
from kdagen.target import CDNA, TARGETS, Target, target_of
from kdagen.variants import VARIANTS, Variant, variants_of


def _variants(heads: tuple[int, ...] | None, targets: Sequence[Target] = TARGETS) -> list[Variant]:
    chosen = [variant for variant in VARIANTS if variant.target in targets]
    if heads is None:
        return chosen
    return [variant for target in targets for count in heads for variant in variants_of(count, target)]


def build(arguments: argparse.Namespace) -> int:
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


def list_kernels(arguments: argparse.Namespace) -> int:
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


def verify(arguments: argparse.Namespace) -> int:
    from kdagen import verify

    return verify.main_report(
        _variants(arguments.heads, (CDNA,)),
        quick=arguments.quick,
        token=arguments.case,
        source=arguments.source,
        json_path=arguments.json,
    )


def inspect(arguments: argparse.Namespace) -> int:
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


def bench(arguments: argparse.Namespace) -> int:
    from kdagen import bench

    heads, rows = arguments.heads or bench.DEFAULT_HEADS, arguments.rows or bench.DEFAULT_ROWS
    if min(rows) < 1:
        raise SpecError(f"--rows: expected batch sizes of 1 or more, got {min(rows)}")
    if arguments.tune is not None:
        from kdagen import bench_tune

        return bench_tune.main_report(arguments.tune, arguments.heads, arguments.rows)
    return bench.main_report(heads, rows, arguments.json, arguments.plot, arguments.vllm_src)


def doctor(arguments: argparse.Namespace) -> int:
    from kdagen import doctor

    return doctor.main_report(sys.stdout)
