"""`kdagen verify`: generated kernels run lane by lane over a matrix of cases, each graded against the fp64 oracle."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kdagen import emulator, grading, reference
from kdagen.cases import Case, matrix
from kdagen.errors import SpecError
from kdagen.render import render
from kdagen.status import status_line
from kdagen.table import aligned
from kdagen.variants import Variant


@dataclass(frozen=True)
class CaseResult:
    """One case on one kernel; `symptoms` says what was wrong and is empty for a pass."""

    case: Case
    state_error: float
    output_ulps: float
    conv_words: int
    races: int
    symptoms: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class VariantResult:
    """All cases of one kernel, in the order they ran."""

    variant: Variant
    cases: tuple[CaseResult, ...]
    seconds: float

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that failed."""
        return tuple(result for result in self.cases if result.symptoms)


def compile_variant(variant: Variant, source: Path | str | None = None) -> emulator.EmulatedKernel:
    """The kernel of a variant for the emulator: its rendered text, or another source with the same launcher."""
    return emulator.compile_source(source or render(variant), lds_bytes=variant.plan.lds_bytes)


def verify_case(kernel: emulator.EmulatedKernel, variant: Variant, case: Case) -> CaseResult:
    """Run one case and grade it: faults of the emulator first, then null rows, state, outputs, window, strays."""
    start = time.monotonic()
    arguments = case.arguments()
    expected = reference.fused_kda_decode(**{**arguments, "out": None})
    snapshot = grading.Snapshot(arguments)
    report = emulator.run_decode(
        kernel, variant.launch_symbol, **arguments, options=emulator.EmulatorOptions(**case.emulator_settings())
    )
    symptoms = [f"{fault.kind.value}: {fault.message}" for fault in report.faults]
    if report.launch_status:
        symptoms.append(f"launch failed: status {report.launch_status}")
    races = sum(fault.count for fault in report.faults if fault.kind is emulator.FaultKind.RACE)

    live_rows, live_slots = case.live()
    null_rows = [row for row in range(case.rows) if row not in live_rows]
    out = arguments["out"][0]
    if not (out[null_rows] == 0).all():
        symptoms.append("null row: its output is not zero")

    state_error = grading.state_error(arguments["state"][live_slots], expected.state[live_rows])
    if state_error > grading.STATE_TOLERANCE:
        symptoms.append(
            f"wrong state: error {state_error:.2g} of the largest element, {grading.STATE_TOLERANCE:.2g} allowed"
        )
    output_ulps = grading.output_ulps(out, expected.out[0])
    misrounded = grading.misrounded_share(out, expected.out[0])
    if output_ulps > grading.OUTPUT_TOLERANCE_ULPS:
        symptoms.append(f"wrong output: {output_ulps:.3g} bf16 ulps off, {grading.OUTPUT_TOLERANCE_ULPS:g} allowed")
    elif misrounded > grading.MISROUNDED_SHARE:
        symptoms.append(f"wrong rounding: {misrounded:.1%} of the outputs are not the nearest bf16")
    conv_words = grading.differing_words(arguments["conv_state"][live_slots], expected.conv_state[live_rows])
    if conv_words:
        symptoms.append(f"wrong conv window: {conv_words} words differ")
    stray = snapshot.stray_bytes(live_slots)
    if stray:
        symptoms.append(f"stray write: {stray} bytes outside out and the named slots")
    return CaseResult(case, state_error, output_ulps, conv_words, races, tuple(symptoms), time.monotonic() - start)


def verify_variant(
    variant: Variant,
    cases: Sequence[Case],
    *,
    source: Path | str | None = None,
    stop_at_first: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> VariantResult:
    """Compile one kernel and run its cases.

    Args:
        variant: the kernel's row.
        cases: what to run; each must have the variant's head count.
        source: another text to run under the same launcher; None renders the variant.
        stop_at_first: end with the first failing case.
        progress: called with the number of cases done.
    """
    start = time.monotonic()
    kernel = compile_variant(variant, source)
    results: list[CaseResult] = []
    for case in cases:
        results.append(verify_case(kernel, variant, case))
        progress(len(results))
        if stop_at_first and results[-1].symptoms:
            break
    return VariantResult(variant, tuple(results), time.monotonic() - start)


def main_report(
    variants: Sequence[Variant],
    *,
    quick: bool,
    token: str | None,
    source: Path | None,
    json_path: Path | None,
) -> int:
    """Run the matrix (or the one case of `token`) on every variant and print the table; 0 if nothing failed, else 1."""
    if token is not None:
        case = Case.parse(token)
        variants = [variant for variant in variants if variant.spec.num_heads == case.num_heads]
        if not variants:
            raise SpecError(f"--case: expected a case of one of the chosen head counts, got {token!r}")
    if source is not None and len(variants) != 1:
        raise SpecError(f"--source: expected one head count with it, got {len(variants)}; add `--heads N`")
    if source is not None and not source.is_file():
        raise SpecError(f"--source: expected a file, got {str(source)!r}")

    results = []
    with _compiled_ahead(variants, source):
        for variant in variants:
            cases = [case] if token is not None else matrix(variant.spec.num_heads, quick=quick)
            with _progress(variant, len(cases)) as progress:
                results.append(verify_variant(variant, cases, source=source, progress=progress))
    print(_table(results))
    if json_path is not None:
        json_path.write_text(json.dumps(_json(results), indent=1) + "\n", encoding="utf-8")
    failures = [(result.variant, failure) for result in results for failure in result.failures]
    if not failures:
        count = sum(len(result.cases) for result in results)
        print(f"\n{count} cases on {len(results)} kernels: none failed")
        return 0
    variant, failure = failures[0]
    print(f"\n{len(failures)} cases failed. The first, on {variant.name}:")
    for symptom in failure.symptoms[:5]:
        print(f"  {symptom}")
    again = f"kdagen verify --heads {variant.spec.num_heads} --case {failure.case.token()}"
    print(f"Run it alone:\n  {again}" + (f" --source {source}" if source is not None else ""))
    return 1


def _compiled_ahead(variants: Sequence[Variant], source: Path | None) -> ThreadPoolExecutor:
    """Compiles the kernels in the background, in order, while earlier ones run; a failure shows when its turn comes."""
    pool = ThreadPoolExecutor(max_workers=2)
    for variant in variants:
        pool.submit(compile_variant, variant, source)
    return pool


@contextmanager
def _progress(variant: Variant, cases: int) -> Iterator[Callable[[int], None]]:
    """How many cases of a kernel are done; in a log one line when all are."""
    start = time.monotonic()
    with status_line() as show:

        def advance(done: int) -> None:
            show(f"{variant.name}: {done}/{cases} cases, {time.monotonic() - start:.0f} s")

        advance(0)
        yield advance
        show(f"{variant.name}: {cases} cases in {time.monotonic() - start:.1f} s", lasting=True)


def _table(results: Sequence[VariantResult]) -> str:
    header = ("variant", "cases", "failed", "state error", "output ulps", "conv words", "races", "seconds")
    rows = []
    for result in results:
        rows.append(
            (
                result.variant.name,
                str(len(result.cases)),
                str(len(result.failures)),
                f"{max((c.state_error for c in result.cases), default=0.0):.1e}",
                f"{max((c.output_ulps for c in result.cases), default=0.0):.2f}",
                str(sum(c.conv_words for c in result.cases)),
                str(sum(c.races for c in result.cases)),
                f"{result.seconds:.1f}",
            )
        )
    note = "state error: of a head's largest element; output ulps: of bf16, from the correctly rounded fp64 oracle"
    return aligned(header, rows, right=range(1, len(header))) + "\n" + note


def _json(results: Sequence[VariantResult]) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "variants": [
            {
                "variant": result.variant.name,
                "seconds": round(result.seconds, 3),
                "cases": [
                    {
                        "case": c.case.token(),
                        "state_error": _number(c.state_error),
                        "output_ulps": _number(c.output_ulps),
                        "conv_words": c.conv_words,
                        "races": c.races,
                        "symptoms": list(c.symptoms),
                        "seconds": round(c.seconds, 3),
                    }
                    for c in result.cases
                ],
            }
            for result in results
        ],
    }


def _number(value: float) -> float | None:
    """JSON has no infinity: None says that Inf or NaN differ from the oracle's."""
    return value if math.isfinite(value) else None
