"""Follows a kernel's machine code from its entry and says what each wave has asked of memory when it first waits.

The text alone cannot say it: a wait that stands above the state loads may be on a branch whose waves have asked for
nothing. So each wave of a workgroup is walked by itself. Scalar values that follow from the wave's number are computed,
everything else is unknown, and at a branch on an unknown value both ways are walked: a wait is never missed, though one
on a way that no wave takes may be reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

VECTOR_MEMORY = re.compile(r"(?:global|flat|buffer|scratch)_(?!wbl2|inv|wbinvl1)")
"""What a wait on vmcnt waits for."""
STATE_LOAD = re.compile(r"(?:global|flat|buffer)_load_dwordx4 ")
STATE_STORE = re.compile(r"(?:global|flat|buffer)_store_dwordx4 ")
"""The state is the only tensor that is accessed 16 bytes at a time."""

_ONES = {32: (1 << 32) - 1, 64: (1 << 64) - 1}


def vector_wait(line: str) -> int | None:
    """How many vector memory operations an instruction lets stay under way; None if it waits for none of them."""
    found = re.match(r"s_waitcnt\b.*\bvmcnt\((\d+)\)", line)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class FirstWait:
    """The first wait on vector memory of one path: its place in the code and the state loads issued before it.

    `index` is None where the path had issued every state load before it waited.
    """

    index: int | None
    state_loads: int


@dataclass
class _Wave:
    """A wave on its way: the values it is known to hold, by register (32 bits each; scc 1 bit), and what it asked."""

    place: int
    known: dict[str, int]
    asked: int = 0
    state_loads: int = 0
    seen: set[object] = field(default_factory=set)

    def at(self, place: int) -> _Wave:
        return _Wave(place, dict(self.known), self.asked, self.state_loads, self.seen)


def first_waits(code: Sequence[str], waves: int) -> tuple[FirstWait, ...]:
    """The distinct first waits of every path of every wave that comes to load state.

    Args:
        code: instructions as `mnemonic operands`, labels as `L0:`.
        waves: waves of a workgroup, 64 lanes each along x.
    """
    labels = {line[:-1]: index for index, line in enumerate(code) if line.endswith(":")}
    total = sum(bool(STATE_LOAD.match(line)) for line in code)
    found: set[FirstWait] = set()
    for wave in range(waves):
        start = {"v0": 64 * wave, "exec_lo": _ONES[32], "exec_hi": _ONES[32]}
        ways = [_Wave(0, start)]
        while ways:
            ways += _walk(ways.pop(), code, labels, total, found)
    return tuple(sorted(found, key=lambda wait: (wait.state_loads, wait.index or 0)))


def _walk(wave: _Wave, code: Sequence[str], labels: dict[str, int], total: int, found: set[FirstWait]) -> list[_Wave]:
    """Walk to the first wait, to the end, or to a branch that goes both ways; returns the ways on from there."""
    while wave.place < len(code):
        line = code[wave.place]
        if line.endswith(":"):
            key = (wave.place, wave.asked, wave.state_loads, frozenset(wave.known.items()))
            if key in wave.seen:  # a loop that changes nothing, or two ways that met
                return []
            wave.seen.add(key)
        elif (left := vector_wait(line)) is not None and wave.asked > left:
            found.add(FirstWait(wave.place, wave.state_loads))
            return []
        elif line.startswith("s_endpgm"):
            return []  # a row without a slot
        elif line.startswith(("s_branch", "s_cbranch")):
            target = labels.get(line.split()[-1], len(code))
            taken = True if line.startswith("s_branch") else _condition(line.split()[0], wave.known)
            if taken is None:
                return [wave.at(target), wave.at(wave.place + 1)]
            wave.place = target if taken else wave.place + 1
            continue
        elif VECTOR_MEMORY.match(line):
            wave.asked += 1
            wave.state_loads += bool(STATE_LOAD.match(line))
            if wave.state_loads == total:
                found.add(FirstWait(None, total))
                return []
        _execute(line, wave.known)
        wave.place += 1
    return []


def _condition(branch: str, known: dict[str, int]) -> bool | None:
    if branch.startswith("s_cbranch_scc"):
        scc = known.get("scc")
        return None if scc is None else scc == int(branch[-1])
    if branch.startswith("s_cbranch_vcc"):
        vcc = _read("vcc", 64, known)
        return None if vcc is None else (vcc == 0) == branch.endswith("vccz")
    return None


def _parts(register: str) -> list[str]:
    """The 32-bit registers that an operand names."""
    if register in ("vcc", "exec"):
        return [f"{register}_lo", f"{register}_hi"]
    if several := re.fullmatch(r"([sva])\[(\d+):(\d+)\]", register):
        return [f"{several[1]}{number}" for number in range(int(several[2]), int(several[3]) + 1)]
    return [register]


def _read(operand: str, bits: int, known: dict[str, int]) -> int | None:
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", operand):
        return int(operand, 0) & _ONES[bits]
    parts = [known.get(part) for part in _parts(operand)]
    value = 0
    for position, part in enumerate(parts):
        if part is None:
            return None
        value |= part << 32 * position
    return value & _ONES[bits]


def _execute(line: str, known: dict[str, int]) -> None:
    """What an instruction does to the known values: the few scalar operations that branches hang on, else a loss."""
    mnemonic, _, rest = line.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    bits = 64 if mnemonic.endswith("64") else 32
    value: int | None = None
    scc: int | None = None
    if mnemonic.startswith("s_cmp_"):
        scc = _compared(mnemonic, operands, known)
        _set(known, "scc", scc, 32)
        return
    if mnemonic in ("s_mov_b32", "s_mov_b64", "s_movk_i32"):
        _set(known, operands[0], _read(operands[1], bits, known), bits)
        return
    if mnemonic == "v_readfirstlane_b32":
        _set(known, operands[0], known.get(operands[1]), 32)
        return
    if mnemonic.startswith("s_cselect_"):
        if "scc" in known:
            value = _read(operands[1 if known["scc"] else 2], bits, known)
        _set(known, operands[0], value, bits)
        return
    if mnemonic in _BINARY:
        a, b = _read(operands[1], bits, known), _read(operands[2], bits, known)
        if a is not None and b is not None:
            value = _BINARY[mnemonic](a, b) & _ONES[bits]
        elif mnemonic.startswith("s_and_b") and 0 in (a, b):
            value = 0
        _set(known, operands[0], value, bits)
        _set(known, "scc", None if value is None else int(value != 0), 32)
        return
    if mnemonic.startswith("s_") and not mnemonic.startswith(_KEEPS_SCC):
        known.pop("scc", None)
    if "saveexec" in mnemonic or mnemonic.startswith("v_cmpx"):
        _set(known, "exec", None, 64)
    if mnemonic.startswith("v_cmp") and mnemonic.endswith("_e32"):
        _set(known, "vcc", None, 64)
    carries = "_co_" in mnemonic or mnemonic.startswith("v_div_scale")  # and write where to in the second operand
    for operand in operands[: 2 if carries else 1]:
        _set(known, operand, None, 64)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "s_and_b32": int.__and__,
    "s_and_b64": int.__and__,
    "s_or_b32": int.__or__,
    "s_or_b64": int.__or__,
    "s_xor_b64": int.__xor__,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_lshl_b32": lambda a, b: a << (b & 31),
}
_KEEPS_SCC = ("s_load_", "s_mul_", "s_waitcnt", "s_nop", "s_barrier", "s_mov", "s_cbranch")


def _compared(mnemonic: str, operands: Sequence[str], known: dict[str, int]) -> int | None:
    bits = 64 if mnemonic.endswith("64") else 32
    a, b = (_read(operand, bits, known) for operand in operands)
    if a is None or b is None or (mnemonic.endswith("_i32") and max(a, b) >> 31):
        return None
    relation = mnemonic.split("_")[2]
    holds = {"eq": a == b, "lg": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return int(holds[relation])


def _set(known: dict[str, int], register: str, value: int | None, bits: int) -> None:
    parts = _parts(register)
    for position, part in enumerate(parts[: max(1, bits // 32)] if value is not None else parts):
        if value is None:
            known.pop(part, None)
        else:
            known[part] = value >> 32 * position & _ONES[32]
