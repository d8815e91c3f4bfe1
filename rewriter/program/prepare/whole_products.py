"""Multiplies by a widened matrix at once where a program multiplies by all its parts.

    w = q.astype(bfloat16) * s                 w = q.astype(bfloat16) * s
    a = x @ w[:, :n]                   →       y = x @ w
    b = x @ w[:, n:]                           a, b = y[:, :n], y[:, n:]

Queries, keys and values are often stored in one array of few bits, and taken apart when
it is widened. Then no product reads the stored numbers as they lie. Every column of a
result is the same sum as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter import _jax
from rewriter.ops.stored import FEW_BITS
from rewriter.program.bodies import map_bodies
from rewriter.program.contents import Contents, contents_of
from rewriter.program.equations import Equations, live
from rewriter.program.loops import inserted

PARTS = frozenset({"slice", "split"})
"""Primitives that take parts of a matrix."""

LAYOUT = frozenset({"squeeze", "transpose"})
"""Primitives that may stand between a part and its product."""

STEPS = frozenset({
    "convert_element_type", "mul", "div", "sub", "add", "transpose", "reshape",
    "squeeze", "expand_dims", "broadcast_in_dim", "optimization_barrier",
})  # fmt: skip
"""What may stand between stored numbers and a matrix."""

STORED = frozenset(map(jnp.dtype, FEW_BITS))
REACH = 48
"""The most values between stored numbers and a matrix."""


@dataclass(frozen=True)
class Part:
    """A product with a part of a matrix.

    Attributes:
        dot: The product.
        side: Which operand is the part.
        matrix: The matrix.
        axis: The axis of which it is a part.
        start: The first position there.
        stop: The one behind the last.
        squeezed: Whether the part has no such axis.
        turned: Whether the part has both axes of the matrix in the other order.
    """

    dot: Any
    side: int
    matrix: Any
    axis: int
    start: int
    stop: int
    squeezed: bool
    turned: bool

    @property
    def group(self) -> tuple[Any, ...]:
        """What parts have in common that one product may join."""
        names = "dimension_numbers", "precision", "preferred_element_type"
        params = (str(self.dot.params.get(name)) for name in names)
        other = self.dot.invars[1 - self.side]
        own = self.matrix, self.axis, self.side, self.squeezed, self.turned
        return (*own, other, *params)

    @property
    def dims(self) -> Any:
        """The dimension numbers of the product with the whole matrix."""
        if not (self.squeezed or self.turned):
            return self.dot.params["dimension_numbers"]
        if self.turned:
            move = lambda axes: tuple(1 - int(a) for a in axes)
        else:
            move = lambda axes: tuple(a + (a >= self.axis) for a in map(int, axes))
        pairs = [
            list(map(tuple, pair)) for pair in self.dot.params["dimension_numbers"]
        ]
        for pair in pairs:
            pair[self.side] = move(pair[self.side])
        return tuple(map(tuple, pairs))

    @property
    def out_axis(self) -> int:
        """The axis of the result of the product with the whole matrix."""
        contracted, batch = self.dims
        gone = {*map(int, contracted[self.side]), *map(int, batch[self.side])}
        before = len([a for a in range(self.axis) if a not in gone])
        if self.side == 0:
            return len(batch[0]) + before
        rows = self.dot.invars[0].aval.ndim
        return rows - len(contracted[0]) + before


def multiply_whole(program: Any) -> Any:
    """Returns a program of products with whole widened matrices.

    It is the program itself where no parts of one make it up.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, _changed, wanted=PARTS)


def _changed(body: Any) -> Any:
    """A body that multiplies by whole matrices; itself if it takes none apart."""
    near = _near(contents_of(body))
    if not near:
        return body
    held, groups = Equations(body), {}
    for dot, side in near:
        part = _part(held, dot, side)
        if part is not None:
            groups.setdefault(part.group, []).append(part)
    groups = [g for g in groups.values() if _make_it_up(g)]
    if not groups:
        return body
    first = {id(g[0].dot): g for g in groups}
    gone = {id(part.dot) for g in groups for part in g}
    eqns: list[Any] = []
    for eqn in body.eqns:
        if id(eqn) in first:
            eqns += _joined(first[id(eqn)])
        elif id(eqn) not in gone:
            eqns.append(eqn)
    return _jax.with_equations(body, live(eqns, held.outs)[0], held.outs)


def _near(held: Contents) -> list[tuple[Any, int]]:
    """Products, and operands of theirs that are parts of widened matrices."""
    found: list[tuple[Any, int]] = []
    for dot in held.named({"dot_general"}):
        for side in (0, 1):
            made = _made(held.makers, dot.invars[side])
            if made is not None and made.primitive.name in LAYOUT:
                made = _made(held.makers, made.invars[0])
            if made is None or made.primitive.name not in PARTS:
                continue
            if _is_widened(held.makers, made.invars[0]):
                found.append((dot, side))
    return found


def _made(makers: Mapping[Any, Any], value: Any) -> Any:
    """The equation of a value; None for a literal or an input."""
    return None if _jax.is_literal(value) else makers.get(value)


def _part(held: Equations, dot: Any, side: int) -> Part | None:
    """The part of a matrix that an operand is; None for another one."""
    if _jax.is_on_mesh([a.aval for a in dot.invars]):
        return None
    value, layout = dot.invars[side], None
    made = _maker(held, value)
    if made is not None and made.primitive.name in LAYOUT:
        value, layout = made.invars[0], made
        made = _maker(held, value)
    window = _window(made, value)
    if window is None:
        return None
    squeezed, turned = _layout(layout)
    own = {int(a) for pair in dot.params["dimension_numbers"] for a in pair[side]}
    axis, start, stop = window
    if layout is not None and not turned:
        fits = squeezed == (axis,) and stop - start == 1
    else:
        fits = (1 - axis if turned else axis) not in own
    if not fits:
        return None
    return Part(dot, side, made.invars[0], *window, bool(squeezed), turned)


def _maker(held: Equations, value: Any) -> Any:
    """The equation of a value that is read once; None for others."""
    return held.maker(value) if len(held.readers(value)) == 1 else None


def _layout(eqn: Any) -> tuple[tuple[int, ...], bool]:
    """The axes that a step leaves out, and whether it turns a matrix."""
    if eqn is None:
        return (), False
    if eqn.primitive.name == "squeeze":
        return tuple(eqn.params["dimensions"]), False
    return (), tuple(eqn.params["permutation"]) == (1, 0)


def _window(made: Any, value: Any) -> tuple[int, int, int] | None:
    """The axis, the first and the last position of a part of an array."""
    name = made.primitive.name if made is not None else ""
    if name == "split":
        at = next(i for i, v in enumerate(made.outvars) if v is value)
        sizes = [int(n) for n in made.params["sizes"]]
        start = sum(sizes[:at])
        return int(made.params["axis"]), start, start + sizes[at]
    if name != "slice" or set(made.params["strides"] or ()) - {1}:
        return None
    bounds = zip(
        made.params["start_indices"], made.params["limit_indices"], strict=True
    )
    shape = made.invars[0].aval.shape
    taken = [(i, *map(int, b)) for i, b in enumerate(bounds) if b != (0, shape[i])]
    return taken[0] if len(taken) == 1 else None


def _make_it_up(parts: list[Part]) -> bool:
    """Whether parts are all of their matrix, each position once."""
    ends = sorted((p.start, p.stop) for p in parts)
    size = parts[0].matrix.aval.shape[parts[0].axis]
    starts, stops = zip(*ends, strict=True)
    return len(parts) > 1 and (*starts, size) == (0, *stops)


def _is_widened(makers: Mapping[Any, Any], matrix: Any) -> bool:
    """Whether a matrix is made of an array of few bits by local steps."""
    queue, seen = [matrix], {matrix}
    while queue and len(seen) < REACH:
        made = makers.get(queue.pop())
        if made is None or made.primitive.name not in STEPS:
            continue
        new = [a for a in made.invars if not _jax.is_literal(a) and a not in seen]
        if any(a.aval.dtype in STORED and a.aval.ndim > 1 for a in new):
            return True
        queue += new
        seen.update(new)
    return False


def _joined(parts: Sequence[Part]) -> list[Any]:
    """One product in place of those with parts, and the parts of its result."""
    part = parts[0]
    dot, axis = part.dot, part.out_axis
    names = "precision", "preferred_element_type"
    given = {name: dot.params[name] for name in names}

    def code(left: jax.Array, right: jax.Array) -> list[jax.Array]:
        whole = lax.dot_general(left, right, part.dims, **given)
        made = [lax.slice_in_dim(whole, p.start, p.stop, axis=axis) for p in parts]
        return [lax.squeeze(x, (axis,)) if part.squeezed else x for x in made]

    atoms = list(dot.invars)
    atoms[part.side] = part.matrix
    fragment = _jax.trace_placed(code, [a.aval for a in atoms])
    made, results = inserted(fragment, atoms, dot.source_info)
    names_of = dict(zip(results, (p.dot.outvars[0] for p in parts), strict=True))
    return [
        eqn.replace(outvars=[names_of.get(v, v) for v in eqn.outvars]) for eqn in made
    ]
