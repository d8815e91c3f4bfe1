"""Counts the bytes that a program on several devices moves between them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh

from rewriter.errors import RewriterError, caller
from rewriter.program.propagation import Placement, lowered

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\((.*)")
_WITH_OPERANDS = ("all-gather", "collective-permute")
"""Kinds whose start operation returns its operands, its results, and contexts.

Other kinds do so too if their operands are a tuple.
"""

_SHAPE = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")

_GROUP = re.compile(
    r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[(.*?)\] \{(.*?)\})"
)
"""One group as a list, the size of each, or the sizes of axes and those of a group."""

Collectives = dict[str, tuple[int, int]]
"""By kind, the number in the compiled program and the bytes of their results. For a
reduce-scatter the bytes of its operands count, as it moves those."""


def collectives_in(text: str) -> Collectives:
    """Returns the collectives of a compiled program, counting loop bodies once.

    Args:
        text: The result of ``compiled.as_text()``.

    Example:
        >>> collectives_in("%a = f32[8,4]{1,0} all-gather(%b), dimensions={0}")
        {'all-gather': (1, 128)}
        >>> text = "%p = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start("
        >>> collectives_in(text)
        {'collective-permute': (1, 32)}
        >>> collectives_in("%r = ((bf16[8]), bf16[8]) all-reduce-start(")
        {'all-reduce': (1, 16)}
        >>> collectives_in("%s = f32[2] reduce-scatter(%b), replica_groups=[2,4]<=[8]")
        {'reduce-scatter': (1, 32)}
    """
    found: dict[str, list[int]] = defaultdict(list)
    for shapes, kind, start, rest in _LINE.findall(text):
        arrays = _SHAPE.findall(shapes)
        if start and (kind in _WITH_OPERANDS or shapes.startswith("((")):
            arrays = [a for a in arrays if a[0] != "u32" or a[2]]  # without contexts
            arrays = arrays[len(arrays) // 2 :]
        times = _members(rest) if kind == "reduce-scatter" else 1
        found[kind].append(
            times
            * sum(
                math.prod(int(d) for d in dims.split(",") if d) * int(bits or 8) // 8
                for _, bits, dims in arrays
            )
        )
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in sorted(found.items())}


def _members(attributes: str) -> int:
    """The number of devices in a group."""
    groups = _GROUP.search(attributes)
    if groups is None:
        return 1
    listed, size, sizes, axes = groups.groups()
    if size:
        return int(size)
    if listed is not None:
        return len(listed.split(","))
    of = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", sizes)}
    return math.prod(of[name] for name in re.findall(r"'(\w+)'", axes))


def collectives_of(program: ClosedJaxpr, placement: Placement) -> Collectives:
    """Compiles a program for the devices of its mesh; returns its collectives.

    Args:
        program: The program.
        placement: Where its inputs are; an abstract mesh uses the default devices.

    Raises:
        RewriterError: If there are too few devices.
    """
    mesh = placement.mesh
    if isinstance(mesh, AbstractMesh):
        mesh = _made(mesh)
    there = Placement(mesh, placement.inputs, placement.outputs)
    return collectives_in(lowered(program, there).compile().as_text())


def _made(mesh: Any) -> Mesh:
    size, devices = mesh.size, jax.devices()
    if len(devices) < size:
        raise RewriterError(
            f"the program runs on {size} devices, and {len(devices)} are here",
            next_step="Give in_shardings on a mesh of jax.experimental.topologies",
            where=caller(),
        )
    array = np.array(devices[:size]).reshape(mesh.axis_sizes)
    return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)
