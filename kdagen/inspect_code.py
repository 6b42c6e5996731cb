"""`kdagen inspect`: compiles variants for AMD architectures and profiles their machine code, from a cache."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kdagen import inspect_report, isa, machine_code, machine_paths, toolchain
from kdagen.audit import audit_all
from kdagen.errors import SpecError
from kdagen.machine_code import Profile
from kdagen.paths import cache_dir, generated_dir
from kdagen.spec import INSTANCES
from kdagen.status import status_line
from kdagen.target import CDNA
from kdagen.variants import Variant, of_target

DEFAULT_ARCHS = ("gfx942", "gfx950")
QUIET_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """One text to compile for one architecture.

    Attributes:
        variant: the row that the text belongs to.
        arch: architecture.
        text: source, HIP.
    """

    variant: Variant
    arch: str
    text: str


def choose_variants(heads: Sequence[int] | None) -> list[Variant]:
    """The AMD rows of the table with these head counts, or all.

    Raises:
        SpecError: the table has none with a head count; the message lists those it has.
    """
    rows = of_target(CDNA)
    known = sorted({variant.spec.num_heads for variant in rows})
    for count in heads or ():
        if count not in known:
            raise SpecError(f"--heads: expected some of {', '.join(map(str, known))}, got {count}")
    return [variant for variant in rows if heads is None or variant.spec.num_heads in heads]


def choose_archs(archs: Sequence[str]) -> tuple[str, ...]:
    """Architectures as asked for, or those that kernels are made for; raises SpecError for one that is not AMD's."""
    for arch in archs:
        if arch not in CDNA.archs:
            raise SpecError(f"--arch: expected some of {', '.join(CDNA.archs)}, got {arch!r}")
    return tuple(dict.fromkeys(archs)) or DEFAULT_ARCHS


def check_instance(name: str | None) -> None:
    """Raises SpecError, which lists the instances, for a name that is none."""
    known = [instance.name for instance in INSTANCES]
    if name is not None and name not in known:
        raise SpecError(f"--instance: expected one of {', '.join(known)}, got {name!r}")


def committed_text(variant: Variant) -> str:
    """The generated source as it lies on the disk.

    Raises:
        SpecError: it is not there.
    """
    path = generated_dir() / variant.file_name
    if not path.is_file():
        raise SpecError(f"{path}: expected a generated source, found none; run `kdagen build`")
    return path.read_text(encoding="utf-8")


def text_at(revision: str, variant: Variant) -> str:
    """The generated source of a variant as a git revision has it.

    Raises:
        SpecError: generated/ is in no git repository, or the revision or the file in it does not exist.
    """
    folder = generated_dir()

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        except FileNotFoundError:
            raise SpecError(f"--diff: expected git to read {revision!r}, found none") from None

    known = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if known.returncode != 0:
        raise SpecError(f"--diff: expected a revision of the git repository of {folder}, got {revision!r}")
    shown = git("show", f"{known.stdout.strip()}:./{variant.file_name}")
    if shown.returncode != 0:
        raise SpecError(f"--diff: expected {variant.file_name} at {revision}, found none; choose others with --heads")
    return shown.stdout


def main_report(
    heads: Sequence[int] | None,
    archs: Sequence[str],
    *,
    instance: str | None = None,
    json_path: Path | None = None,
    revision: str | None = None,
) -> int:
    """Print the tables, or what differs from a revision, and the audit's verdict; returns 1 if a rule is broken."""
    check_instance(instance)
    rows, chosen = choose_variants(heads), choose_archs(archs)
    before = [] if revision is None else [Job(row, arch, text_at(revision, row)) for row in rows for arch in chosen]
    compiler = toolchain.find_compiler("hip", chosen)
    jobs = [Job(row, arch, committed_text(row)) for row in rows for arch in chosen]

    def profiles_of(jobs: Sequence[Job]) -> list[Profile]:
        return [profile for profile in profile_all(compiler, jobs) if instance in (None, profile.instance)]

    profiles = profiles_of(jobs)
    broken = audit_all(profiles)
    report = inspect_report.as_json(profiles, broken, compiler.version)
    if revision is None:
        print(inspect_report.tables(profiles))
    else:
        changes = inspect_report.difference(profiles_of(before), profiles)
        print(inspect_report.difference_table(changes, revision))
        report["changes_since"] = {"revision": revision, "changes": changes}
    print(inspect_report.verdict(profiles, broken, compiler.version))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--json: expected a file to write, got {str(json_path)!r}: {error.strerror}") from error
    return 1 if broken else 0


def profile_all(compiler: toolchain.Compiler, jobs: Sequence[Job]) -> list[Profile]:
    """The profiles of every instance of every job, in the order of the jobs.

    Raises:
        BuildError: the compiler fails on a source; the message has the log's place.
        ToolchainError: a tool that reads code objects is missing or fails.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, _progress(len(jobs)) as advance:
        futures = {pool.submit(profile, compiler, job): place for place, job in enumerate(jobs)}
        done: dict[int, list[Profile]] = {}
        try:
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                advance()
        finally:  # the first failure is what the user hears of
            pool.shutdown(cancel_futures=True)
    return [instance for place in range(len(jobs)) for instance in done[place]]


def profile(compiler: toolchain.Compiler, job: Job, flags: Sequence[str] = CDNA.flags) -> list[Profile]:
    """The profiles of one job's instances: from the cache if everything that they follow from is the same."""
    folder = cache_dir("inspect")
    key = _cache_key(compiler, job, flags)
    path = folder / f"{key}.json.gz"  # instructions repeat: a tenth of the text
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, TypeError):  # one that is damaged is made anew
        return [from_json(row) for row in json.loads(gzip.decompress(path.read_bytes()))]
    with tempfile.TemporaryDirectory() as sources:
        source = Path(sources, job.variant.file_name)
        source.write_text(job.text, encoding="utf-8")
        output = folder / f"{key}.co"  # here, because a failure's log stays beside it
        try:
            toolchain.compile_device(compiler, job.arch, source, output, flags)
            profiles = machine_code.read_profiles(output, job.variant.name, job.arch, job.variant.spec.state_bytes)
        finally:
            output.unlink(missing_ok=True)
    aside = folder / f"{key}.{os.getpid()}"
    aside.write_bytes(gzip.compress(json.dumps([asdict(instance) for instance in profiles]).encode("utf-8")))
    os.replace(aside, path)
    return profiles


def from_json(row: Mapping[str, Any]) -> Profile:
    """A profile from the mapping that dataclasses.asdict made of it, by way of JSON."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Profile(**values)


def _cache_key(compiler: toolchain.Compiler, job: Job, flags: Sequence[str]) -> str:
    """A digest of all that a profile follows from, the modules that read code objects among it."""
    digest = hashlib.sha256()
    for part in (*compiler.command, compiler.version, job.variant.name, job.arch, *flags, job.text, *_readers()):
        digest.update(len(part).to_bytes(8, "little") + part.encode("utf-8"))
    return digest.hexdigest()[:24]


@cache
def _readers() -> tuple[str, ...]:
    modules = (isa, machine_code, machine_paths)
    return tuple(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """How many sources are compiled, if it takes longer than a glance; in a log once."""
    start, done, told = time.monotonic(), 0, False
    with status_line() as show:

        def advance() -> None:
            nonlocal done, told
            done += 1
            if time.monotonic() - start >= QUIET_SECONDS:
                show(f"kdagen: compiled {done} of {total} sources", lasting=not told)
                told = True

        yield advance
