"""Runs an op's kernel on each device's part of its operands.

The op says along which of its letters it may be split (`Op.sharding`). Operands split
along other axes are gathered, if another axis of the result already uses the devices,
as XLA does. Otherwise the op is left to XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rewriter import _jax
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.op import OUT, Op, Part, Sharding
from rewriter.program.propagation import Axes, Split
from rewriter.program.propagation import spec_of as partition_spec
from rewriter.site.nested_shards import differentiable


class NoShards(Exception):
    """Says why an op is not computed part by part."""


@dataclass(frozen=True)
class Shards:
    """The split of one use of an op over devices.

    Attributes:
        mesh: The devices by named axes.
        specs: (operand, how it is split) for each operand present.
        out: How the result is split.
        letters: (letter, mesh axes) for each of the op's letters that is split.
        summed: The mesh axes over which the parts' results are summed.
        gathered: (operand, mesh axes) for each operand that devices must gather.
        kept: (operand, how it is split in the program) for the gathered ones: floats
            are computed in that split, and then gathered.
        passed: (operand, mesh axes) for each operand that devices pass around.
        around: The same with operands passed around instead of gathered, if the op
            allows it.
    """

    mesh: Any
    specs: tuple[tuple[str, PartitionSpec], ...]
    out: PartitionSpec
    letters: tuple[tuple[str, Axes], ...]
    summed: Axes = ()
    gathered: tuple[tuple[str, Axes], ...] = ()
    kept: tuple[tuple[str, PartitionSpec], ...] = ()
    passed: tuple[tuple[str, Axes], ...] = ()
    around: Shards | None = None

    @property
    def ring(self) -> Axes:
        """The mesh axes around which operands are passed, or ()."""
        return self.passed[0][1] if self.passed else ()

    def parts(self, axes: Axes) -> int:
        """Returns the number of parts of an axis that is split over these mesh axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    @property
    def text(self) -> str:
        """In words, such as ``"b over data, n over model; k, v gathered over seq"``."""
        split = [f"{letter} over {' and '.join(axes)}" for letter, axes in self.letters]
        moved = [*_moves(self.passed, "passed around"),
                 *_moves(self.gathered, "gathered over")]  # fmt: skip
        return "; ".join([", ".join(split) or "replicated", *moved])


def _moves(moved: Sequence[tuple[str, Axes]], how: str) -> list[str]:
    """Operands that are gathered or passed, in words, grouped by mesh axes."""
    by_axes: dict[Axes, list[str]] = {}
    for name, axes in moved:
        by_axes.setdefault(axes, []).append(name)
    return [f"{', '.join(n)} {how} {' and '.join(a)}" for a, n in by_axes.items()]


def shards_of(
    op: Op,
    params: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    splits: Mapping[str, Split | None],
    mesh: Any,
) -> Shards:
    """Returns how an op is split over devices.

    Args:
        op: The op.
        params: Its parameters.
        shapes: The shapes of the operands present, and of the result.
        splits: How each of them is split in the program.
        mesh: The devices by named axes.

    Raises:
        NoShards: If splitting it would move more data than XLA does.
    """
    rule = op.spread(params)
    if rule is None:
        raise NoShards(f"{op.name} does not say along which axes it may be split")
    sizes = dict(mesh.shape)
    known: dict[str, Split] = {}
    for name, split in splits.items():
        if split is None:
            raise NoShards(f"{name} is split over a part of a mesh axis")
        known[name] = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in split)
    dims = rule.dims or op.dims
    letters = {n: _letters(dims.get(n, ""), n, len(x)) for n, x in shapes.items()}
    chosen = _chosen(rule, letters, known, _smaller_first(rule, letters, shapes))
    for letter, leader in rule.follows.items():
        if leader in chosen and _sizes(letter, letters, shapes) - {1}:
            chosen[letter] = chosen[leader]
    for letter, axes in chosen.items():
        parts = math.prod(sizes[a] for a in axes)
        _check_divides(letter, parts, letters, shapes)
    shards = _spread_by(rule, chosen, letters, shapes, known, mesh)
    return replace(
        shards, around=_in_a_ring(rule, chosen, letters, shapes, known, mesh)
    )


def _spread_by(
    rule: Sharding,
    chosen: Mapping[str, Axes],
    letters: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    known: Mapping[str, Split],
    mesh: Any,
) -> Shards:
    """How an op is split along these letters."""
    specs: dict[str, Split] = {}
    gathered = []
    for name, shape in shapes.items():
        specs[name] = tuple(
            chosen.get(x, ()) if n > 1 else ()
            for x, n in zip(letters[name], shape, strict=True)
        )
        moved = _moved(name, letters[name], known[name], specs[name], chosen)
        if moved and name != OUT:  # XLA decides where the result goes next
            gathered.append((name, moved))
    return Shards(
        mesh,
        tuple((n, partition_spec(s)) for n, s in specs.items() if n != OUT),
        partition_spec(specs[OUT]),
        tuple(chosen.items()),
        tuple(a for x, axes in chosen.items() if x in rule.sums for a in axes),
        tuple(gathered),
        tuple((n, partition_spec(known[n])) for n, _ in gathered),
    )


def _in_a_ring(
    rule: Sharding,
    chosen: Mapping[str, Axes],
    letters: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    known: Mapping[str, Split],
    mesh: Any,
) -> Shards | None:
    """The split with operands passed around; None if that is impossible.

    They must be split like the result, into equal parts. The mesh's axes must be of one
    kind.
    """
    ring = rule.ring
    axes = chosen.get(ring.rows, ()) if ring else ()
    if ring is None or not axes or len(set(mesh.axis_types)) > 1:
        return None
    for name in {*ring.moving} & {*ring.passed}:
        if known[name][letters[name].index(ring.letter)] != axes:
            return None
    try:
        count = math.prod(mesh.shape[a] for a in axes)
        _check_divides(ring.letter, count, letters, shapes)
    except NoShards:
        return None
    split = {**chosen, ring.letter: axes}
    shards = _spread_by(rule, split, letters, shapes, known, mesh)
    passed = tuple((n, axes) for n in ring.passed if n in shapes)
    return replace(shards, letters=tuple(chosen.items()), passed=passed)


def _letters(dims: str, name: str, rank: int) -> list[str]:
    """An array's letters; leading axes are ``...1``, the last of them, ``...2`` etc."""
    letters = [x.split("|")[0] for x in dims.split()]
    if letters[:1] == ["..."]:
        lead = rank - len(letters) + 1
        letters = [f"...{lead - i}" for i in range(lead)] + letters[1:]
    if len(letters) != rank:
        raise NoShards(f"{name} has {rank} axes, and its letters are {dims!r}")
    return letters


def _smaller_first(
    rule: Sharding,
    letters: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[frozenset[str], ...]:
    """The kinds of letters in the order in which they get mesh axes.

    Where two kinds want the same axis, operands without the letter that gets it are
    gathered. If the results of parts are merged, these may be the smaller ones.
    """
    sizes = [0, 0]
    for name, shape in shapes.items():
        if name != OUT:
            sizes[not rule.merges.isdisjoint(letters[name])] += math.prod(shape)
    if rule.merges and sizes[0] < sizes[1]:
        return rule.merges, rule.along, rule.sums
    return rule.along, rule.sums, rule.merges


def _chosen(
    rule: Sharding,
    letters: Mapping[str, Sequence[str]],
    known: Mapping[str, Split],
    kinds: Sequence[frozenset[str]],
) -> dict[str, Axes]:
    """The mesh axes of each split letter, taken from the first operand that has it."""
    chosen: dict[str, Axes] = {}
    used: set[str] = set()
    for allowed in kinds:
        for name, split in known.items():
            for letter, axes in zip(letters[name], split, strict=True):
                letter = rule.follows.get(letter, letter)
                plain = "..." if letter.startswith("...") else letter
                may = plain in allowed and letter not in chosen
                if may and axes and not used & {*axes}:
                    chosen[letter] = axes
                    used |= {*axes}
    return chosen


def _sizes(
    letter: str,
    letters: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> set[int]:
    return {
        n
        for name, shape in shapes.items()
        for x, n in zip(letters[name], shape, strict=True)
        if x == letter
    }


def _check_divides(
    letter: str,
    parts: int,
    letters: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    for n in _sizes(letter, letters, shapes):
        if n != 1 and n % parts:
            name = "leading axis" if letter.startswith("...") else f"axis {letter}"
            raise NoShards(f"{name} of {n} cannot be split into {parts} equal parts")


def _moved(
    name: str,
    letters: Sequence[str],
    found: Split,
    wanted: Split,
    chosen: Mapping[str, Axes],
) -> Axes:
    """The axes over which an operand is gathered.

    Raises:
        NoShards: If gathering would leave devices without work of their own.
    """
    busy = {a for axes in chosen.values() for a in axes}
    moved: list[str] = []
    for letter, has, wants in zip(letters, found, wanted, strict=True):
        lost = [a for a in has if a not in wants]
        idle = [a for a in lost if a not in busy]
        if idle:
            what = "the result" if name == OUT else name
            raise NoShards(
                f"{what} is split along {letter.rstrip('0123456789')} over "
                f"{' and '.join(idle)}, along which the op cannot be split"
            )
        moved += lost
    return tuple(moved)


# ------------------------------------------------------------------- one part
def local_spec(
    op: Op, shards: Shards, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> Spec:
    """Returns the use of the op on one device.

    Args:
        op: The op.
        shards: How it is split; one part is seen of operands that are passed around.
        operands: Shapes and dtypes by name.
        params: The op's parameters.
    """
    sizes = dict(shards.mesh.shape)
    specs = dict(shards.specs)
    structs = {
        name: jax.ShapeDtypeStruct(_local(x.shape, specs[name], sizes), x.dtype)
        for name, x in operands.items()
    }
    if shards.passed:
        return spec_of(op, structs, params)
    rule = op.spread(params)
    assert rule is not None
    own: list[Mapping[str, Any]] = []

    def changed(operands: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = {
            letter: Part(0, math.prod(sizes[a] for a in axes), axes)
            for letter, axes in shards.letters
        }
        result, static = _changed(rule, operands, params, parts)
        own.append(static)
        return {
            k: v for k, v in result.items() if k in operands or k not in rule.unseen
        }

    return spec_of(op, jax.eval_shape(changed, structs), own[0] if own else params)


def _local(shape: Sequence[int], spec: Any, sizes: Mapping[str, int]) -> tuple:
    axes = [() if a is None else (a,) if isinstance(a, str) else a for a in spec]
    parts = [math.prod(sizes[x] for x in a) for a in axes]
    return tuple(n // p for n, p in zip(shape, parts, strict=True))


def _changed(
    rule: Sharding,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Operands and parameters, adjusted so that a part gives its share of the whole."""
    if rule.local is None:
        return operands, params
    return rule.local(operands, params, parts)


def spread(
    op: Op,
    shards: Shards,
    operands: Mapping[str, jax.Array],
    params: Mapping[str, Any],
    compute: Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array],
    backward: bool = False,
) -> jax.Array:
    """Returns the op of whole operands, computed part by part.

    Args:
        op: The op.
        shards: How it is spread.
        operands: Its operands by name.
        params: Its parameters, including defaults.
        compute: ``compute(operands, params)`` computes it on one device.
        backward: Whether its gradients are computed too.
    """
    rule = op.spread(params)
    assert rule is not None
    names = [name for name, _ in shards.specs]

    def on_device(*arrays: jax.Array) -> jax.Array:
        given = dict(zip(names, arrays, strict=True))
        operands = dict(zip(names, _jax.with_common_varying(arrays), strict=True))
        if shards.passed:  # the ring handles positions itself
            return compute(operands, params)
        parts = {
            letter: Part(jax.lax.axis_index(axes), shards.parts(axes), axes)
            for letter, axes in shards.letters
        }
        out = compute(*_changed(rule, operands, params, parts))
        if rule.finish is not None:
            out = rule.finish(out, given, params, parts)
        return jax.lax.psum(out, shards.summed) if shards.summed else out

    whole = _ready(operands, shards)
    specs, mesh = [spec for _, spec in shards.specs], shards.mesh
    if _jax.is_typed_part(mesh):
        same = plain(op, names, params)
        mapped = differentiable(on_device, same, mesh, specs, shards.out, backward)
    else:
        mapped = _jax.mapped(on_device, mesh, specs, shards.out)
    return mapped(*(whole[n] for n in names))


def plain(
    op: Op, names: Sequence[str], params: Mapping[str, Any]
) -> Callable[..., jax.Array]:
    """The op in plain JAX, as a function of whole operands in an order."""

    def reference(*arrays: jax.Array) -> jax.Array:
        same = _jax.with_common_varying(arrays)
        return op.reference(**dict(zip(names, same, strict=True)), **params)

    return reference


def _ready(operands: Mapping[str, jax.Array], shards: Shards) -> dict[str, jax.Array]:
    """The operands, prepared for a shard_map over the mesh's kind of axes."""
    whole, mesh = dict(operands), shards.mesh
    if AxisType.Explicit in mesh.axis_types:  # the type must match the spec
        for name, spec in shards.specs:
            stated = _jax.on_explicit_axes(spec, mesh)
            whole[name] = jax.sharding.reshard(whole[name], NamedSharding(mesh, stated))
        return whole
    for name, spec in shards.kept:  # otherwise every device would compute all of it
        if jnp.issubdtype(whole[name].dtype, jnp.floating):
            sharding = NamedSharding(shards.mesh, spec)
            whole[name] = jax.lax.with_sharding_constraint(whole[name], sharding)
    return whole
