"""Reads compiled code objects back: each kernel's registers, LDS and spills, and its instructions."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdagen.errors import ToolchainError
from kdagen.toolchain import find_tool


@dataclass(frozen=True)
class KernelMetadata:
    """What the code object says of one kernel (AMDGPU metadata, code object V5); registers per lane, sizes in bytes.

    `vgprs` is the whole of the one register file: the `agprs` (accumulator registers) are counted in it.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    workgroup_threads: int
    code_bytes: int


def read_metadata(code_object: Path) -> dict[str, KernelMetadata]:
    """Every kernel of an AMDGPU code object by its symbol.

    Raises:
        ToolchainError: the file is no AMDGPU code object, or pyelftools and msgpack are not installed.
    """
    try:
        import msgpack
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
        from elftools.elf.sections import NoteSection
    except ImportError as error:
        raise ToolchainError(
            f"expected pyelftools and msgpack to read a code object, got: {error}; pip install 'kdagen[inspect]'"
        ) from error
    with code_object.open("rb") as file:
        try:
            elf = ELFFile(file)
            notes = [n for s in elf.iter_sections() if isinstance(s, NoteSection) for n in s.iter_notes()]
            sizes = _sizes(elf)
        except ELFError as error:
            raise ToolchainError(
                f"{code_object}: expected an AMDGPU code object, got a file that is not ELF"
            ) from error
    found = [note for note in notes if note["n_name"] == "AMDGPU"]
    if not found:
        raise ToolchainError(f"{code_object}: expected an AMDGPU code object, got an ELF file without AMDGPU metadata")
    description = found[0]["n_desc"]
    packed = description if isinstance(description, bytes) else description.encode("latin-1")
    kernels = msgpack.unpackb(packed)["amdhsa.kernels"]
    return {
        kernel[".name"]: KernelMetadata(
            name=kernel[".name"],
            vgprs=kernel[".vgpr_count"],
            agprs=kernel.get(".agpr_count", 0),
            sgprs=kernel[".sgpr_count"],
            vgpr_spills=kernel[".vgpr_spill_count"],
            sgpr_spills=kernel[".sgpr_spill_count"],
            lds_bytes=kernel[".group_segment_fixed_size"],
            scratch_bytes=kernel[".private_segment_fixed_size"],
            workgroup_threads=kernel[".max_flat_workgroup_size"],
            code_bytes=sizes.get(kernel[".name"], 0),
        )
        for kernel in kernels
    }


def undefined_symbols(code_object: Path) -> tuple[str, ...]:
    """What a code object expects someone else to define, sorted: a kernel that needs nothing has none."""
    from elftools.elf.elffile import ELFFile

    with code_object.open("rb") as file:
        found = [symbol.name for symbol in _dynamic_symbols(ELFFile(file)) if symbol["st_shndx"] == "SHN_UNDEF"]
    return tuple(sorted(filter(None, found)))


def _sizes(elf: Any) -> dict[str, int]:
    """Bytes of each symbol's code, without the padding behind it."""
    return {symbol.name: symbol["st_size"] for symbol in _dynamic_symbols(elf)}


def _dynamic_symbols(elf: Any) -> list[Any]:
    """The symbols that a loader sees; an elf is pyelftools' ELFFile."""
    table = elf.get_section_by_name(".dynsym")
    return list(table.iter_symbols()) if table is not None else []


_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def offload_archs(library: Path) -> tuple[str, ...]:
    """The AMD architectures that a HIP library holds code objects for, sorted.

    Reads the offload bundles of section .hip_fatbin: the magic, the number of entries, and for each entry its offset,
    size, name length (all 8 bytes, little endian) and name (LLVM, "Clang Offload Bundler").

    Raises:
        ToolchainError: the file has no such section or no bundle in it, or pyelftools is not installed.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise ToolchainError(
            f"expected pyelftools to read a library, got: {error}; pip install 'kdagen[inspect]'"
        ) from error
    with library.open("rb") as file:
        try:
            section = ELFFile(file).get_section_by_name(".hip_fatbin")
        except ELFError as error:
            raise ToolchainError(f"{library}: expected a HIP library, got a file that is not ELF") from error
        if section is None:
            raise ToolchainError(f"{library}: expected a HIP library, got one without .hip_fatbin")
        data: bytes = section.data()
    archs = set()
    start = data.find(_BUNDLE_MAGIC)
    if start < 0:  # --offload-compress
        raise ToolchainError(f"{library}: expected plain offload bundles in .hip_fatbin, got none; is it compressed?")
    while start >= 0:
        position = start + len(_BUNDLE_MAGIC)
        entries = int.from_bytes(data[position : position + 8], "little")
        position += 8
        for _ in range(entries):
            length = int.from_bytes(data[position + 16 : position + 24], "little")
            name = data[position + 24 : position + 24 + length].decode()
            position += 24 + length
            if "amdgcn" in name:
                archs.add(name.rsplit("-", 1)[1])
        start = data.find(_BUNDLE_MAGIC, position)
    return tuple(sorted(archs))


def disassemble(code_object: Path) -> dict[str, tuple[str, ...]]:
    """The instructions of every function of an AMDGPU code object by its symbol, as `mnemonic operands`."""
    return {
        name: instructions
        for name, lines in disassemble_with_labels(code_object).items()
        if (instructions := tuple(text for _, text in lines if not text.endswith(":")))
    }


def disassemble_with_labels(code_object: Path) -> dict[str, tuple[tuple[int, str], ...]]:
    """As disassemble, each line behind its address in bytes; a branch names a label, which is a line such as `L0:`."""
    from elftools.elf.elffile import ELFFile

    objdump = find_tool("llvm-objdump")
    command = [objdump, "-d", "--symbolize-operands", str(code_object)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise ToolchainError(f"expected {objdump} to read {code_object}, got: {done.stderr.strip()}")
    functions: dict[str, list[tuple[int, str]]] = {}
    with code_object.open("rb") as file:
        sizes = _sizes(ELFFile(file))
    current: list[tuple[int, str]] = []
    labels: list[str] = []
    end = 0
    for line in done.stdout.splitlines():
        if found := re.fullmatch(r"(?:[0-9a-f]+ )?<(L\d+)>:", line.strip()):
            labels.append(found[1])
        elif symbol := re.fullmatch(r"([0-9a-f]+) <(.+)>:", line):
            current, labels = functions.setdefault(symbol[2], []), []
            end = int(symbol[1], 16) + sizes[symbol[2]] if symbol[2] in sizes else sys.maxsize
        elif instruction := re.fullmatch(r"\t(\S.*?)\s*// ([0-9A-F]+): .*", line):
            address = int(instruction[2], 16)
            if address >= end:  # padding behind the function, which may read as instructions
                continue
            current += [(address, f"{label}:") for label in labels]
            labels = []
            current.append((address, " ".join(instruction[1].split())))
    return {name: tuple(lines) for name, lines in functions.items() if lines}
