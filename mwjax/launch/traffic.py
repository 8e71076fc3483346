"""What one run of a compiled program moves, per chip: collectives, over the links of a slice and over the network
between slices, and bytes to and from main memory."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from mwjax.launch import hlo

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# Over the network: a transfer that the runtime of several slices (Megascale) takes from a chip to the other slices.
NETWORK = "between slices"
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# They move nothing: names for what is there, and the halves of a transfer that is counted at its other half.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "copy-start", "slice-start", "async-start", "async-update"),
    *("async-done", "send", "recv", "send-done", "recv-done", "add-dependency"),
}
_FREE_CALLS = ("ConcatBitcast", "AsyncCollective", "AllocateBuffer", "AssumeGatherIndicesInBound")
_SLICES = ("dynamic-slice", "slice", "gather")


class Collective(NamedTuple):
    """Collectives of one kind in one run of a program. number: how many; bytes: what they yield, per chip (what is
    handed over, between slices); sent: what a chip has to send for them, by the cheapest algorithm (a ring)."""

    kind: str
    number: int
    bytes: int
    sent: int


class Traffic(NamedTuple):
    """collectives: by kind, the most sent first; hbm_bytes: read and written in main memory; unknown_loops: loops
    that run a number of times that only the data decides (their bodies count once)."""

    collectives: tuple[Collective, ...]
    hbm_bytes: int
    unknown_loops: int

    @property
    def over_links(self) -> int:
        """Bytes a chip has to send within its slice."""
        return sum(one.sent for one in self.collectives if one.kind != NETWORK)

    @property
    def over_network(self) -> int:
        """Bytes a chip has to send to other slices."""
        return sum(one.sent for one in self.collectives if one.kind == NETWORK)


def count(module: hlo.Module, devices: int, slices: int = 1) -> Traffic:
    """Traffic of one device in one run of a program for ``devices`` devices, spread over so many slices."""
    totals = dict.fromkeys((*KINDS, NETWORK), (0, 0, 0))
    moved, unknown, halves = 0, 0, set()
    for done in hlo.executed(module):
        instruction = done.instruction
        unknown += done.unknown
        kind = _kind(done)
        if kind is not None:
            # One that runs beside other work is written into several fusions of one computation.
            chain = re.search(r'channel_id=\d+.*chain_id="?\d+', instruction.attributes)
            key = (done.computation.name, kind, chain[0] if chain else instruction.name)
            if key in halves:
                continue
            halves.add(key)
            size, sent = _between(instruction, slices) if kind == NETWORK else _cost(kind, done, devices)
            before = totals[kind]
            totals[kind] = (before[0] + done.times, before[1] + done.times * size, before[2] + done.times * sent)
            moved += done.times * (instruction.hbm_bytes + _operand_bytes(done))
        elif done.fused is None:
            moved += done.times * _hbm_bytes(module, done)
    made = [Collective(kind, *values) for kind, values in totals.items() if values[0]]
    return Traffic(tuple(sorted(made, key=lambda one: -one.sent)), moved, unknown)


def _kind(done: hlo.Executed) -> str | None:
    """The kind of collective an instruction is; None for others, and for the end of one."""
    if done.instruction.opcode == "send" and _TRANSFER.search(done.instruction.attributes):
        return NETWORK
    kind = done.instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if kind == "all-reduce" and done.fused is not None and "all-reduce-scatter" in done.fused.attributes:
        return "reduce-scatter"
    return kind


def _cost(kind: str, done: hlo.Executed, devices: int) -> tuple[int, int]:
    """(bytes that a collective yields, bytes that a device has to send for it)."""
    instruction = done.instruction
    arrays = instruction.arrays
    if instruction.opcode.endswith("-start") and len(instruction.operands) < len(arrays):
        # (operands, results, flags); all-reduce-start yields its results alone.
        arrays = arrays[len(instruction.operands) : 2 * len(instruction.operands)]
    elif kind == "all-reduce":
        arrays = arrays[: max(len(instruction.operands), 1)]
    size, group = sum(array.bytes for array in arrays), group_size(instruction, devices)
    if done.fused is not None and kind == "reduce-scatter" and instruction.opcode.startswith("all-reduce"):
        size //= group
    if kind in ("collective-permute", "collective-broadcast"):
        return size, size
    share = {"all-gather": 1, "all-to-all": 1, "all-reduce": 2, "reduce-scatter": group}[kind] * (group - 1) / group
    return size, round(size * share)


def _between(instruction: hlo.Instruction, slices: int) -> tuple[int, int]:
    """(bytes that a device hands over for the other slices, bytes that are sent for them)."""
    size = instruction.arrays[0].bytes
    (transfer,) = _TRANSFER.findall(instruction.attributes)
    others = (slices - 1) / slices
    shares = {"ALL_REDUCE": 2 * others, "REDUCE_SCATTER": others, "ALL_TO_ALL": others, "ALL_GATHER": slices - 1}
    return size, round(size * shares.get(transfer, 1))


def group_size(instruction: hlo.Instruction, devices: int) -> int:
    """How many devices take part together in a collective; all where it does not say."""
    text = instruction.attributes
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text)
    if counted:
        return int(counted[2])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    return devices


def _operand_bytes(done: hlo.Executed) -> int:
    if done.fused is not None:
        return done.instruction.hbm_bytes  # what it reads is a part of the fusion; as much as it writes, or less
    instructions = done.computation.instructions
    return sum(instructions[name].hbm_bytes for name in done.instruction.operands if name in instructions)


def _hbm_bytes(module: hlo.Module, done: hlo.Executed) -> int:
    """Bytes an instruction reads and writes in main memory."""
    instruction, instructions = done.instruction, done.computation.instructions
    opcode = instruction.opcode
    if opcode in _FREE or opcode.removesuffix("-done") in KINDS:
        return 0
    if opcode == "custom-call" and any(name in instruction.attributes for name in _FREE_CALLS):
        return 0
    if opcode in ("copy-done", "slice-done"):  # between main memory and the core
        return sum(array.bytes for array in instruction.arrays)
    if opcode == "fusion":
        return _fusion_bytes(module, instruction, instructions)
    operands = [instructions[name] for name in instruction.operands if name in instructions]
    if opcode in _SLICES:
        return 2 * instruction.hbm_bytes
    if opcode in ("dynamic-update-slice", "scatter"):
        changed = operands[1 if opcode == "dynamic-update-slice" else -1]
        return 2 * sum(array.bytes for array in changed.arrays) if instruction.hbm_bytes else 0
    return instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands)


def _fusion_bytes(module: hlo.Module, fusion: hlo.Instruction, outside: dict[str, hlo.Instruction]) -> int:
    """Of an operand that only slices are taken from, the slices; of a result that is a large array with a slice
    changed, the slice; of what is handed on, nothing."""
    computation = module.computations.get(fusion.refers("calls") or "")
    if computation is None:
        return fusion.hbm_bytes
    inside = computation.instructions
    total = 0
    for number, name in enumerate(fusion.operands):
        source, parameter = outside.get(name), computation.parameters.get(number)
        if source is not None and source.hbm_bytes and parameter is not None:
            total += min(_read(module, computation, parameter), source.hbm_bytes)
    results = computation.root.operands if computation.root.opcode == "tuple" else (computation.root.name,)
    for name, array in zip(results, fusion.arrays):
        made = _beneath(inside, name)
        if array.space or made is None or made.opcode == "parameter":
            continue
        changed = inside.get(made.operands[1]) if made.opcode == "dynamic-update-slice" else None
        total += array.bytes if changed is None else min(array.bytes, sum(part.bytes for part in changed.arrays))
    return total


def _beneath(inside: dict[str, hlo.Instruction], name: str) -> hlo.Instruction | None:
    """The instruction a name stands for, behind bitcasts."""
    found = inside.get(name)
    while found is not None and found.opcode == "bitcast" and found.operands:
        found = inside.get(found.operands[0])
    return found


def _read(module: hlo.Module, computation: hlo.Computation, parameter: hlo.Instruction) -> int:
    """How many bytes of a fusion's parameter are read, by what is fused into it at any depth."""
    whole = sum(array.bytes for array in parameter.arrays)
    total, pending = 0, [(computation, parameter)]
    while pending:
        inside, source = pending.pop()
        if inside is not computation and source.root:
            return whole  # it goes on in the fusion around
        for user in inside.users.get(source.name, ()):
            if user.opcode in _SLICES and user.operands[0] == source.name:
                total += sum(array.bytes for array in user.arrays)
            elif user.opcode in ("bitcast", "get-tuple-element"):
                pending.append((inside, user))
            elif user.opcode == "fusion" and (inner := module.computations.get(user.refers("calls") or "")):
                places = [number for number, name in enumerate(user.operands) if name == source.name]
                pending += [(inner, inner.parameters[number]) for number in places]
            elif not _is_handed_on(source, user):
                return whole
    return total


def _is_handed_on(source: hlo.Instruction, user: hlo.Instruction) -> bool:
    """Whether an instruction in a fusion reads nothing of an operand: it changes a part of it, or its bytes are counted
    elsewhere."""
    if user.opcode == "dynamic-update-slice":
        return user.operands[0] == source.name
    return user.opcode in ("tuple", "custom-call") or user.opcode.removesuffix("-start") in KINDS
