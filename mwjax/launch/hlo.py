"""Compiled programs as XLA prints them: instructions, and how often each runs.

XLA's own cost analysis counts the body of a loop once, and the layers of a decoder are a loop. Here a loop's body
counts as often as it runs: where XLA does not say how often that is, it is worked out from the loop's condition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_FORWARDED = ("copy", "bitcast", "convert", "copy-start", "copy-done")
_AS_LONG_AS = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b}


class Array(NamedTuple):
    """An array of a program. space: 0 is the chip's main memory (HBM); others are on the compute core."""

    dimensions: tuple[int, ...]
    bytes: int
    space: int


@dataclass(frozen=True)
class Instruction:
    """One instruction: what it yields (several arrays for a tuple), its operands by name, and the rest as text."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    inside: str
    attributes: str
    root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.inside))

    def refers(self, attribute: str) -> str | None:
        """The computation that an attribute names (``body``, ``calls``, ...)."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @cached_property
    def index(self) -> int | None:
        """The place in a tuple that ``get-tuple-element`` takes."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else None

    @property
    def hbm_bytes(self) -> int:
        """Bytes of what it yields that lie in main memory."""
        return sum(array.bytes for array in self.arrays if array.space == 0)


@dataclass(frozen=True)
class Computation:
    """A function of the program; its instructions in the order they are scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next(i for i in reversed(self.instructions.values()) if i.root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """What it is handed, by number."""
        return {int(i.inside): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By name, the instructions that take it as an operand."""
        made: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                made.setdefault(name, []).append(instruction)
        return made


@dataclass(frozen=True)
class Module:
    """A program for one device."""

    computations: dict[str, Computation]
    entry: Computation


class Executed(NamedTuple):
    """An instruction of a program and how often it runs. fused: the instruction that it is a part of, where it is not
    scheduled itself; unknown: a loop of which only the data decides how often it runs (its body counts once)."""

    computation: Computation
    instruction: Instruction
    times: int
    fused: Instruction | None = None
    unknown: bool = False


def parse(text: str) -> Module:
    """A compiled program, as ``Compiled.as_text`` prints it. Raises ValueError where it has no entry."""
    computations: dict[str, Computation] = {}
    entry, current = None, Computation("", {})
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = Computation(header[2], {})
            entry = current if header[1] else entry
            continue
        named = _NAMED.match(line)
        if named:
            made = _instruction(named[2], bool(named[1]), line[named.end() :])
            if made is not None:
                current.instructions[made.name] = made
    if entry is None:
        raise ValueError("a compiled program without an entry computation: XLA prints it otherwise than known here")
    return Module(computations, entry)


def _instruction(name: str, root: bool, text: str) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = re.match(r"\s*([\w\-]+)\(", text[end:])
    if opcode is None:
        return None
    start = end + opcode.end() - 1
    close = _closing(text, start)
    return Instruction(name, _arrays(text[:end]), opcode[1], text[start + 1 : close], text[close + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    return len(text)


def _arrays(text: str) -> tuple[Array, ...]:
    made = []
    for kind, sizes, layout in _ARRAY.findall(text):
        dimensions = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        space = re.search(r"S\((\d+)\)", layout)
        size = -(-math.prod(dimensions) * _bits(kind) // 8)
        made.append(Array(dimensions, size, int(space[1]) if space else 0))
    return tuple(made)


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = re.match(r"[a-z]+(\d+)", kind)
    return int(digits[1]) if digits else 8


@dataclass(frozen=True)
class _Frame:
    """A computation that is being walked through (a loop's body or condition), the loop, its body, and where it is."""

    computation: Computation
    loop: Instruction | None = None
    body: Computation | None = None
    outer: _Frame | None = None


def executed(module: Module) -> Iterator[Executed]:
    """Every instruction that runs, loops' bodies with the number of times. Of a conditional all branches count."""
    yield from _walk(module, _Frame(module.entry), 1)


def _walk(module: Module, frame: _Frame, times: int) -> Iterator[Executed]:
    for instruction in frame.computation.instructions.values():
        if instruction.opcode == "while":
            body = module.computations[instruction.refers("body") or ""]
            trips = trip_count(module, frame, instruction)
            yield Executed(frame.computation, instruction, times, unknown=trips is None)
            yield from _walk(module, _Frame(body, instruction, body, frame), times * (1 if trips is None else trips))
            continue
        yield Executed(frame.computation, instruction, times)
        if instruction.opcode in ("call", "conditional", "async-start"):
            for name in _called(instruction):
                if name in module.computations:
                    yield from _walk(module, _Frame(module.computations[name]), times)
        elif instruction.opcode == "fusion":
            for inner in _inside(module, instruction):
                yield Executed(frame.computation, inner, times, instruction)


def _called(instruction: Instruction) -> list[str]:
    several = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if several:
        return [name.strip().lstrip("%") for name in several[1].split(",")]
    names = ("to_apply", "calls", "true_computation", "false_computation")
    return [found for found in map(instruction.refers, names) if found]


def _inside(module: Module, fusion: Instruction) -> Iterator[Instruction]:
    """What is fused into an instruction, at any depth."""
    computation = module.computations.get(fusion.refers("calls") or "")
    for instruction in computation.instructions.values() if computation else ():
        yield instruction
        if instruction.opcode == "fusion":
            yield from _inside(module, instruction)


def trip_count(module: Module, frame: _Frame, loop: Instruction) -> int | None:
    """How often a loop runs: as XLA says, or worked out where it counts from one constant to another; else None."""
    said = _TRIPS.search(loop.attributes)
    if said:
        return int(said[1])
    condition = module.computations.get(loop.refers("condition") or "")
    body = module.computations.get(loop.refers("body") or "")
    if condition is None or body is None or condition.root.opcode != "compare":
        return None
    inside = _Frame(body, loop, body, frame)
    counter = _source(condition, condition.root.operands[0])
    direction = re.search(r"direction=(\w+)", condition.root.attributes)
    goes_on = _AS_LONG_AS.get(direction[1]) if direction else None
    limit = _constant(_Frame(condition, loop, body, frame), condition.root.operands[1])
    if counter is None or counter.index is None or goes_on is None or limit is None:
        return None
    first, step = _handed(frame, loop, counter.index), _step(inside, counter.index)
    if first is None or not step:
        return None
    if not goes_on(first, limit):
        return 0
    distance = (limit - first) / step
    inclusive = direction is not None and direction[1] in ("LE", "GE")
    return (math.floor(distance) + 1 if inclusive else math.ceil(distance)) if distance >= 0 else None


def _handed(frame: _Frame, loop: Instruction, index: int) -> int | None:
    """The constant that a loop starts with at a place of its tuple."""
    start = frame.computation.instructions.get(loop.operands[0])
    return _constant(frame, start.operands[index]) if start is not None and start.opcode == "tuple" else None


def _step(body: _Frame, index: int) -> int | None:
    """By how much a loop's body raises what it is handed at a place of its tuple."""
    root = body.computation.root
    made = _source(body.computation, root.operands[index]) if root.opcode == "tuple" else None
    if made is None or made.opcode != "add":
        return None
    left, right = made.operands
    for counter, added in ((left, right), (right, left)):
        taken = _source(body.computation, counter)
        if taken is not None and taken.opcode == "get-tuple-element" and taken.index == index:
            return _constant(body, added)
    return None


def _constant(frame: _Frame, name: str) -> int | None:
    """The integer a name stands for, also where a loop around it hands it on unchanged."""
    found = _source(frame.computation, name)
    if found is None:
        return None
    if found.opcode == "constant":
        return int(found.inside) if re.fullmatch(r"-?\d+", found.inside) else None
    if found.opcode == "get-tuple-element":
        if frame.loop is None or frame.body is None or frame.outer is None or not _unchanged(frame.body, found.index):
            return None
        return _handed(frame.outer, frame.loop, found.index or 0)
    return None


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction a name stands for, behind copies."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in _FORWARDED and found.operands:
        found = computation.instructions.get(found.operands[0])
    return found


def _unchanged(body: Computation, index: int | None) -> bool:
    """Whether a loop's body hands on what it is handed at a place of its tuple."""
    if index is None or body.root.opcode != "tuple":
        return False
    made = _source(body, body.root.operands[index])
    if made is None or made.opcode != "get-tuple-element" or made.index != index:
        return False
    return body.instructions[made.operands[0]].opcode == "parameter"
