"""One compiled kernel instance as figures: what its registers allow, what its instructions are, when it waits.

A Profile is made of what kdagen.isa reads and holds the instructions themselves; every figure that follows from them is
a property, computed from the lines alone, so that a hand-written list of lines is as good as a compiled kernel.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kdagen import isa
from kdagen.errors import ToolchainError
from kdagen.machine_paths import STATE_STORE, VECTOR_MEMORY, FirstWait, first_waits, vector_wait
from kdagen.spec import INSTANCES
from kdagen.toolchain import find_tool

LDS_BYTES_PER_CU = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
"""LDS of a compute unit (AMD, "CDNA 3" white paper, 64 KB; "CDNA 4" white paper, 160 KB)."""
SIMDS_PER_CU = 4
WAVE_LANES = 64
MAX_WAVES_PER_SIMD = 8
MAX_WORKGROUPS_PER_CU = 16
"""Of more than one wave each: a compute unit has as many barriers (LLVM, AMDGPUBaseInfo.cpp)."""
VGPRS_PER_SIMD = 512
"""Per lane, accumulator registers among them, handed out in granules (LLVM, "User Guide for AMDGPU", gfx90a on)."""
VGPR_GRANULE = 8
SGPRS_PER_SIMD = 800

CLASSES: tuple[tuple[str, str], ...] = (
    ("DPP", r"v_\S+_dpp|.* (quad_perm|row_\w+):?"),
    ("transcendental", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    ("packed fp32", r"v_pk_(fma|mul|add)_f32"),
    ("VALU", r"v_"),
    ("vector memory", r"(global|flat|buffer|scratch)_"),
    ("LDS", r"ds_"),
    ("barrier", r"s_barrier"),
    ("wait", r"s_wait"),
    ("nop", r"s_nop"),
    ("scalar", r"s_"),
)
"""Instruction classes and how a line of each begins; the first that fits counts, so that each line has one class."""

_WIDTHS = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}
_POLICIES = ("glc", "slc", "sc0", "sc1", "nt")


@dataclass(frozen=True)
class Profile:
    """One instance of one variant, compiled for one architecture.

    Attributes:
        variant: name of the variant.
        instance: name of the instance.
        arch: architecture it was compiled for.
        vgprs: vector registers per lane, the accumulator registers among them.
        agprs: accumulator registers among them.
        sgprs: scalar registers per wave.
        vgpr_spills: vector registers that the compiler spilled.
        sgpr_spills: scalar registers that it spilled.
        scratch_bytes: scratch memory per lane.
        lds_bytes: LDS of a workgroup.
        workgroup_threads: threads of a workgroup.
        code_bytes: size of the machine code.
        state_bytes: of the state that a workgroup loads and stores.
        cycles: of one wave by llvm-mca's model of the arch, one pass through the text with no memory latency beyond the
            model's and both sides of every branch: good to compare two texts, not to predict a time.
        undefined: symbols that the code object expects someone else to define.
        code: the instructions as `mnemonic operands`, and labels as `L0:`.
    """

    variant: str
    instance: str
    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    workgroup_threads: int
    code_bytes: int
    state_bytes: int
    cycles: int
    undefined: tuple[str, ...]
    code: tuple[str, ...]

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The instructions without the labels."""
        return tuple(line for line in self.code if not line.endswith(":"))

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        return -(-self.workgroup_threads // WAVE_LANES)

    @property
    def waves_per_simd(self) -> int:
        """Waves that the registers let one SIMD hold at once."""
        granules = max(1, -(-self.vgprs // VGPR_GRANULE)) * VGPR_GRANULE
        return min(MAX_WAVES_PER_SIMD, VGPRS_PER_SIMD // granules, SGPRS_PER_SIMD // max(1, self.sgprs))

    @property
    def workgroups_per_cu(self) -> int:
        """Workgroups that one compute unit holds at once, by registers and LDS."""
        by_waves = SIMDS_PER_CU * self.waves_per_simd // self.waves
        by_lds = LDS_BYTES_PER_CU[self.arch] // self.lds_bytes if self.lds_bytes else MAX_WORKGROUPS_PER_CU
        return min(by_waves, by_lds, MAX_WORKGROUPS_PER_CU)

    @property
    def state_bytes_in_flight(self) -> int:
        """Bytes of state that the resident workgroups of a compute unit have asked for at once."""
        return self.workgroups_per_cu * self.state_bytes

    @cached_property
    def classes(self) -> dict[str, int]:
        """How many instructions there are of each class."""
        counts = Counter(class_of(line) for line in self.lines)
        return {name: counts[name] for name, _ in CLASSES}

    @cached_property
    def memory(self) -> dict[str, int]:
        """How many vector memory instructions there are of each direction, width and cache policy, by name."""
        return dict(sorted(Counter(memory_kind(line) for line in self.lines if VECTOR_MEMORY.match(line)).items()))

    @cached_property
    def first_waits(self) -> tuple[FirstWait, ...]:
        """The first wait on vector memory of every path, with the state loads issued before it."""
        return first_waits(self.code, self.waves)

    @property
    def state_loads_before_wait(self) -> int:
        """State loads that every wave has issued when it first waits on vector memory."""
        return min((wait.state_loads for wait in self.first_waits), default=0)

    @property
    def state_accesses(self) -> int:
        """Loads that the state takes per lane at 16 bytes each, and as many stores."""
        return self.state_bytes // (16 * self.workgroup_threads)

    @cached_property
    def recurrence(self) -> range:
        """Places in `lines` from behind the last barrier before the first state store to the last state store."""
        stores = [place for place, line in enumerate(self.lines) if STATE_STORE.match(line)]
        if not stores:
            return range(0)
        barriers = [place for place in range(stores[0]) if self.lines[place].startswith("s_barrier")]
        return range(barriers[-1] + 1 if barriers else 0, stores[-1] + 1)

    @property
    def recurrence_waits(self) -> int:
        """Waits on vector memory inside the recurrence: how finely it takes the rows as they come."""
        return sum(vector_wait(self.lines[place]) is not None for place in self.recurrence)


def class_of(line: str) -> str:
    """The class of an instruction; `other` if no pattern fits."""
    return next((name for name, pattern in CLASSES if re.match(pattern, line)), "other")


def memory_kind(line: str) -> str:
    """A vector memory instruction by space, direction, bytes per lane and cache policy: `global load 16 nt`."""
    mnemonic, *operands = line.replace(",", " ").split()
    space, direction, *rest = mnemonic.split("_")
    width = rest[0] if rest else ""
    wide = re.fullmatch(r"dwordx(\d)", width)
    size = str(4 * int(wide[1]) if wide else _WIDTHS.get(width, width)).strip()
    return " ".join(filter(None, [space, direction, size, *(word for word in operands if word in _POLICIES)]))


def instance_names(variant: str) -> dict[str, str]:
    """Symbol of every instance of a variant to the instance's name."""
    found = {}
    for instance in INSTANCES:
        arguments = "".join(f"Lb{int(flag)}E" for flag in instance.flags)
        found[f"_Z{len(variant)}{variant}I{arguments}Ev15KdaDecodeParams"] = instance.name
    return found


def read_profiles(code_object: Path, variant: str, arch: str, state_bytes: int) -> list[Profile]:
    """The profile of every kernel of a code object; a kernel that is no instance of the variant keeps its symbol.

    Raises:
        ToolchainError: the file is no code object, or an LLVM tool is missing or fails.
    """
    names, metadata = instance_names(variant), isa.read_metadata(code_object)
    undefined = isa.undefined_symbols(code_object)
    disassembly = isa.disassemble_with_labels(code_object)
    profiles = []
    for symbol, kernel in metadata.items():
        code = tuple(text for _, text in disassembly[symbol])
        profiles.append(
            Profile(
                variant=variant,
                instance=names.get(symbol, symbol),
                arch=arch,
                vgprs=kernel.vgprs,
                agprs=kernel.agprs,
                sgprs=kernel.sgprs,
                vgpr_spills=kernel.vgpr_spills,
                sgpr_spills=kernel.sgpr_spills,
                scratch_bytes=kernel.scratch_bytes,
                lds_bytes=kernel.lds_bytes,
                workgroup_threads=kernel.workgroup_threads,
                code_bytes=kernel.code_bytes,
                state_bytes=state_bytes,
                cycles=static_cycles(code, arch),
                undefined=undefined,
                code=code,
            )
        )
    order = [instance.name for instance in INSTANCES]
    return sorted(profiles, key=lambda p: order.index(p.instance) if p.instance in order else len(order))


def static_cycles(code: Sequence[str], arch: str) -> int:
    """Cycles of one pass through a text, by llvm-mca's model of the arch.

    Raises:
        ToolchainError: llvm-mca is missing, or it does not know an instruction.
    """
    mca = find_tool("llvm-mca")
    text = "".join(f"{line}\n" for line in code if not line.endswith(":"))
    command = [mca, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-iterations=1", "-instruction-info=0"]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", check=False)
    cycles = re.search(r"^Total Cycles:\s+(\d+)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or cycles is None:
        found = re.search(r"error: .*\n.*", done.stderr)  # the second line quotes the instruction
        why = found[0].replace("\n", ": ") if found else f"exit code {done.returncode}"
        raise ToolchainError(f"expected {mca} to know every instruction of {arch}, got: {why}")
    return int(cycles[1])
