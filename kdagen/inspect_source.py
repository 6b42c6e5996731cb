"""`kdagen inspect --source`: one kernel's disassembly with the stage and the line that each instruction comes from."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kdagen import isa, toolchain
from kdagen.errors import SpecError, ToolchainError
from kdagen.inspect_code import check_instance, choose_archs, choose_variants, committed_text
from kdagen.machine_code import instance_names
from kdagen.target import CDNA

LINES = "-gline-tables-only"
"""Names the line and the inlined calls of every instruction, and changes none of them."""
KERNEL = "the kernel itself"
_SECTION = re.compile(r"// ---- (.+?) -+$")


def main_report(heads: Sequence[int] | None, archs: Sequence[str], instance: str | None) -> int:
    """Print one instance's disassembly under the headings of its source; returns 0.

    Raises:
        SpecError: not exactly one head count or architecture is asked for, or one that does not exist.
    """
    if heads is None or len(heads) != 1:
        raise SpecError(f"--source: expected one head count, got {_shown(heads)}; add `--heads 12`")
    if len(archs) != 1:
        raise SpecError(f"--source: expected one architecture, got {_shown(archs)}; add `--arch gfx942`")
    name = instance or "bounded-norm-sd"
    check_instance(name)
    (variant, *_), (arch,) = choose_variants(heads), choose_archs(archs)
    text = committed_text(variant)
    compiler = toolchain.find_compiler("hip", [arch])
    symbol = next(symbol for symbol, known in instance_names(variant.name).items() if known == name)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, variant.file_name)
        source.write_text(text, encoding="utf-8")
        code_object = source.with_suffix(".co")
        toolchain.compile_device(compiler, arch, source, code_object, (*CDNA.flags, LINES))
        code = isa.disassemble_with_labels(code_object)[symbol]
        frames = source_lines(code_object, [address for address, line in code if not line.endswith(":")])
    print(f"; {variant.name} {name} {arch}, {compiler.version}")
    print(marked(code, frames, text))
    return 0


def _shown(values: Iterable[object] | None) -> str:
    return ", ".join(map(str, values or ())) or "none"


def source_lines(code_object: Path, addresses: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The source lines of each address, from the innermost inlined function out to the kernel; 0 for one unknown.

    Raises:
        ToolchainError: llvm-symbolizer is missing or fails.
    """
    symbolizer = toolchain.find_tool("llvm-symbolizer")
    command = [symbolizer, f"--obj={code_object}", "--inlines", "--output-style=JSON"]
    asked = "".join(f"{address:#x}\n" for address in addresses)
    done = subprocess.run(command, input=asked, capture_output=True, encoding="utf-8", check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode != 0 or len(answers) != len(addresses):
        raise ToolchainError(f"expected {symbolizer} to read {code_object}, got: {done.stderr.strip()}")
    return {int(row["Address"], 16): tuple(frame["Line"] for frame in row.get("Symbol", [])) for row in answers}


def sections(text: str) -> list[str]:
    """The section that each line of a generated source is in, by its `// ---- name ---` comments; line 1 is at 0."""
    current, found = "", []
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
        elif line.startswith("KERNEL "):
            current = KERNEL
        found.append(current)
    return found


def stage_of(lines: Sequence[int], section_of: Sequence[str]) -> tuple[str, int]:
    """The stage that an instruction works for, and the line in it.

    It is the innermost of its inlined calls that is in a stage, so that a primitive belongs to its caller; what
    is of no stage belongs to the kernel itself.
    """
    named = [(section_of[line - 1], line) for line in lines if 0 < line <= len(section_of)]
    for section, line in named:
        if section.startswith("stage"):
            return section, line
    return KERNEL, named[-1][1] if named else 0


def marked(code: Sequence[tuple[int, str]], frames: Mapping[int, Sequence[int]], text: str) -> str:
    """The instructions with a heading wherever the stage changes, and the source's line where that changes."""
    section_of, source = sections(text), text.splitlines()
    lines: list[str] = []
    stage, last = "", -1
    for address, instruction in code:
        if instruction.endswith(":"):
            lines.append(instruction)
            continue
        now, line = stage_of(frames.get(address, ()), section_of)
        if now != stage:
            lines.append(f"\n; ---- {now}")
        note = f"; {line}: {source[line - 1].strip()}" if line and (line, now) != (last, stage) else ""
        lines.append(f"    {instruction:<72}  {note}".rstrip())
        stage, last = now, line
    return "\n".join(lines).lstrip("\n")
