"""Reads a value as an array that is put together from parts.

    p = pad[0, 0, 768:1536] a
    q = pad[0, 0, 1536:768] b
    x = add_any p q                    a lies at 768 in x, b at 1536

It follows padding with zeros, sums, concatenations, and what moves no numbers, from the
whole to its parts. Each part is then a strided view of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter import _jax
from rewriter.program.strided_views import View, reshaped, sliced, whole


@dataclass(frozen=True)
class Assembly:
    """An array that is put together from parts.

    Attributes:
        parts: Where each part lies in the array, by the part's variable.
        equations: The equations that put it together, by their identity.
    """

    parts: Mapping[Any, View]
    equations: frozenset[int]


SUMS = ("add_any", "add")
SAME_SIZE = ("reshape", "broadcast_in_dim", "squeeze")
"""What moves no numbers, as long as there are as many."""
ASSEMBLING = frozenset({
    *SUMS, *SAME_SIZE, "pad", "concatenate", "stack", "transpose",
})  # fmt: skip
"""The primitives that an array may be put together by."""


def assembly_of(
    atom: Any, makers: Mapping[Any, Any], reads: Mapping[Any, int], ends: set[Any]
) -> Assembly | None:
    """Returns how a value is put together; None if of anything but some variables.

    Args:
        atom: The value's variable.
        makers: The equation that makes a variable, for all of a body but its inputs.
        reads: How often each variable is read, as a body's result too.
        ends: The variables that may be parts.
    """
    parts: dict[Any, View] = {}
    equations: set[int] = set()

    def add(atom: Any, view: View | None) -> bool:
        if view is None or _jax.is_literal(atom):
            return False
        if atom in ends:
            alone = atom not in parts and reads[atom] == 1
            parts[atom] = view
            return alone
        maker = makers.get(atom)
        if maker is None or (equations and reads[atom] != 1):
            return False
        equations.add(id(maker))
        inner = _inner(maker, view)
        return bool(inner) and all(add(x, v) for x, v in inner)

    if not all(isinstance(d, int) for d in atom.aval.shape) or not add(
        atom, whole(atom)
    ):
        return None
    return Assembly(parts, frozenset(equations))


def _inner(maker: Any, view: View) -> list[tuple[Any, View | None]]:
    """The operands that an equation's result consists of, and where each lies."""
    name, params, x = maker.primitive.name, maker.params, maker.invars[0]
    if name in SUMS:
        alike = all(a.aval.shape == view.shape for a in maker.invars)
        return [(a, view) for a in maker.invars] if alike else []
    if name == "pad":
        return [(x, _padded(maker, view))]
    if name == "concatenate":
        return _concatenated(maker, view)
    if name == "stack":
        return _stacked(maker, view)
    if name == "transpose":
        strides = [0] * len(view.strides)
        for axis, stride in zip(params["permutation"], view.strides, strict=True):
            strides[axis] = stride
        shape = tuple(x.aval.shape)
        return [(x, View(view.source, view.offset, shape, tuple(strides)))]
    turned = name == "reshape" and params.get("dimensions") is not None
    if name in SAME_SIZE and not turned and x.aval.size == maker.outvars[0].aval.size:
        return [(x, reshaped(view, tuple(x.aval.shape)))]
    return []


def _padded(maker: Any, view: View) -> View | None:
    """Where an operand lies that is padded with zeros; None for other paddings."""
    x, value = maker.invars
    zero = _jax.is_literal(value) and value.val == 0
    config = [tuple(map(int, c)) for c in maker.params["padding_config"]]
    if not zero or any(number < 0 for c in config for number in c):
        return None
    starts = [low for low, _, _ in config]
    steps = [1 + between for _, _, between in config]
    return sliced(view, starts, steps, tuple(x.aval.shape))


def _concatenated(maker: Any, view: View) -> list[tuple[Any, View | None]]:
    """The operands of a concatenation, and where each lies."""
    axis, place, made = maker.params["dimension"], 0, []
    for x in maker.invars:
        starts, steps = [0] * len(view.shape), [1] * len(view.shape)
        starts[axis] = place
        made.append((x, sliced(view, starts, steps, tuple(x.aval.shape))))
        place += x.aval.shape[axis]
    return made


def _stacked(maker: Any, view: View) -> list[tuple[Any, View | None]]:
    """The operands of a stack, and where each lies: a concatenation with a new axis."""
    axis = maker.params["axis"]
    strides = (*view.strides[:axis], *view.strides[axis + 1 :])
    return [
        (x, View(view.source, view.offset + i * view.strides[axis], shape, strides))
        for i, x in enumerate(maker.invars)
        for shape in [tuple(x.aval.shape)]
    ]
