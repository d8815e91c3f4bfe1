"""Bytes and operations of the kernels of a compiled program, from its text.

Each instruction of the entry that launches a kernel reads its operands and writes its
results once. A fusion that reads parts of an operand alone reads those. Operations are
those of dots and of calls of cuBLAS, two for each product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4, "s8": 1,
         "u8": 1, "pred": 1, "s64": 8}  # fmt: skip
FREE = frozenset({"parameter", "bitcast", "get-tuple-element", "tuple", "constant"})
ARRAY = re.compile(rf"({'|'.join(SIZES)})\[([\d,]*)\]")
LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name.
        op: What it does.
        shape: The text of its result's shape.
        operands: Names of its operands.
        rest: The text behind the operands.
    """

    name: str
    op: str
    shape: str
    operands: tuple[str, ...]
    rest: str

    @property
    def nbytes(self) -> int:
        """Bytes of the result; of a call without its room for work."""
        found = ARRAY.findall(self.shape)
        found = found[:1] if self.op == "custom-call" else found
        return sum(SIZES[t] * math.prod(dims(d)) for t, d in found)


@dataclass(frozen=True)
class Work:
    """What one instruction does.

    Attributes:
        name: The instruction's name, as its kernel has it.
        nbytes: Bytes read and written.
        flops: Operations of products.
    """

    name: str
    nbytes: int
    flops: float


def dims(text: str) -> list[int]:
    """Returns the sizes in a text such as ``2,3``.

    Example:
        >>> dims("2,3"), dims("")
        ([2, 3], [])
    """
    return [int(x) for x in text.split(",") if x]


def work_of(program: Any) -> list[Work]:
    """Returns the work of a compiled program's kernels, in the order they run."""
    bodies = _computations(program.as_text())
    entry = bodies["ENTRY"]
    made = []
    for x in entry.values():
        if x.op in FREE:
            continue
        called = re.search(r"calls=%([\w.\-]+)", x.rest)
        body = bodies.get(called[1], {}) if called else {}
        given = [entry[y] for y in dict.fromkeys(x.operands) if y in entry]
        flops = sum(_flops(y, body) for y in body.values()) + _flops(x, entry)
        name = re.sub(r"[.\-]", "_", x.name)
        made.append(Work(name, x.nbytes + _read(body, given), flops))
    return made


def _computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Instructions by name, by computation; the entry is called ``ENTRY``."""
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            named = NAME.match(line)
            current = found.setdefault(named[1] if named else "ENTRY", {})
        elif (match := LINE.match(line)) is not None:
            name, shape, op, operands, rest = match.groups()
            read = tuple(NAME.findall(operands))
            current[name] = Instruction(name, op, shape, read, rest)
    return found


def _read(body: Mapping[str, Instruction], given: Sequence[Instruction]) -> int:
    """The bytes of operands that are read; of a part of a result, as much of each."""
    *_, last = body.values() or [None]
    sizes = [x.nbytes for x in given]
    if last is None or last.op != "slice":
        return sum(sizes)
    part = last.nbytes / body[last.operands[0]].nbytes
    return sum(int(x * part) for x in sizes)


DOT = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
CALL = re.compile(r'gemm.*"lhs_contracting_dimensions":\[([\d",]*)\]')


def _flops(x: Instruction, known: Mapping[str, Instruction]) -> float:
    """Operations of an instruction that is a product, two for each of numbers."""
    found = (DOT if x.op == "dot" else CALL).search(x.rest)
    if x.op not in ("dot", "custom-call") or found is None:
        return 0.0
    (_, rows), *_ = ARRAY.findall(known[x.operands[0]].shape)
    (_, out), *_ = ARRAY.findall(x.shape)
    along = dims(found[1].replace('"', ""))
    return 2.0 * math.prod(dims(rows)[d] for d in along) * math.prod(dims(out))
