"""Random changes to a program: some keep its meaning, the others do not.

A program is a closed jaxpr. A mutation is a function of one equation and its
operands' values. The program is traced again with it in that equation's place,
so mutations compose with every spelling and with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from rewriter import _jax

Values = list[jax.Array]
Rule = Callable[[JaxprEqn, Values, np.random.Generator], Values]


@dataclass(frozen=True)
class Mutation:
    """A change of one equation.

    Attributes:
        name: Plain word.
        applies: Whether it can be made at an equation.
        apply: The results in place of the equation's own.
    """

    name: str
    applies: Callable[[JaxprEqn], bool]
    apply: Rule


@dataclass(frozen=True)
class Edit:
    """What is done differently when a program is traced again.

    Attributes:
        rules: Equation number to the mutations there.
        order: The equations' numbers, in the order to be run.
        outlined: First and last position of a run that becomes a jitted call.
        twins: Equations that are computed once for each of their readers.
        first: How many of the program's results are computed where they were.
        inlined: Whether jitted calls are inlined.
        seed: For the choices that mutations make.
    """

    rules: Mapping[int, Sequence[Mutation]] = field(default_factory=dict)
    order: Sequence[int] | None = None
    outlined: tuple[int, int] | None = None
    twins: frozenset[int] = frozenset()
    first: int = 0
    inlined: bool = False
    seed: int = 0


# ---------------------------------------------------------------- programs
def program(fn: Callable, args: Sequence[jax.Array]) -> ClosedJaxpr:
    """The function as a jaxpr with its jitted calls inlined."""
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*args)
    return edited(closed, Edit(inlined=True))


def edited(closed: ClosedJaxpr, edit: Edit) -> ClosedJaxpr:
    """The program traced again with the edit."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars(closed)]
    return jax.make_jaxpr(lambda *a: _run(closed, a, edit))(*avals)


def invars(closed: ClosedJaxpr) -> Sequence:
    """The program's inputs without its constants."""
    return closed.jaxpr.invars


def _run(closed: ClosedJaxpr, args: Sequence[jax.Array], edit: Edit) -> Values:
    rng = np.random.default_rng(edit.seed)
    jaxpr, consts = closed.jaxpr, closed.consts
    env = dict(zip(jaxpr.constvars, consts, strict=False))
    env.update(zip(jaxpr.invars, args, strict=True))
    order = list(range(len(jaxpr.eqns)) if edit.order is None else edit.order)
    first, last = edit.outlined or (len(order), len(order))
    _steps(jaxpr, order[:first], env, edit, rng)
    _outlined(jaxpr, order[first:last], env, edit, rng)
    _steps(jaxpr, order[last:], env, edit, rng)
    return [
        env["result", v]
        if not isinstance(v, Literal) and ("result", v) in env
        else _read(v, env, edit, rng)
        for v in jaxpr.outvars
    ]


def _read(atom, env, edit, rng):
    if isinstance(atom, Literal):
        return jnp.asarray(atom.val, atom.aval.dtype) if np.ndim(atom.val) else atom.val
    value = env[atom]
    return value(rng) if callable(value) else value


def _steps(jaxpr, order, env, edit, rng) -> None:
    for i in order:
        eqn = jaxpr.eqns[i]
        values = [_read(v, env, edit, rng) for v in eqn.invars]
        if i in edit.twins:
            for k, v in enumerate(eqn.outvars):
                env[v] = lambda _, k=k, eqn=eqn, values=values: bind(eqn, values)[k]
                if any(v is out for out in jaxpr.outvars[: edit.first]):
                    env["result", v] = env[v](rng)
            continue
        results = bind(eqn, values, edit.inlined)
        for mutation in edit.rules.get(i, ()):
            results = mutation.apply(eqn, [*values, *results], rng)
        env.update(zip(eqn.outvars, results, strict=True))


def _outlined(jaxpr, order, env, edit, rng) -> None:
    if not order:
        return
    made = [v for i in order for v in jaxpr.eqns[i].outvars]
    known = list({v for v in env if not callable(env[v])})

    def inner(values):
        local = {**env, **dict(zip(known, values, strict=True))}
        _steps(jaxpr, order, local, edit, rng)
        return [_read(v, local, edit, rng) for v in made]

    env.update(zip(made, jax.jit(inner)([env[v] for v in known]), strict=True))


CALLS = ("jit", "pjit", "closed_call", "core_call")


def bind(eqn: JaxprEqn, values: Values, inlined: bool = False) -> Values:
    """The equation's results; with `inlined`, of the body of a jitted call."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inlined and eqn.primitive.name in CALLS and inner is not None:
        return _run(inner, values, Edit(inlined=True))
    found = eqn.primitive.get_bind_params(eqn.params)
    # A pair of functions and parameters in some versions, parameters in others.
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def as_function(closed: ClosedJaxpr) -> Callable:
    """The program as a function of its inputs, without what nobody reads.

    Equations that are written otherwise stay behind unread, and would be found there.
    """
    run = jaxpr_as_fun(_jax.pruned(closed))

    def mutated(*args):
        return run(*args)

    return mutated


# ------------------------------------------------------- choosing mutations
def mutations_at(
    closed: ClosedJaxpr, table: Sequence[Mutation]
) -> list[tuple[int, Mutation]]:
    """Every place and mutation of the table that fits there."""
    return [
        (i, m)
        for i, eqn in enumerate(closed.jaxpr.eqns)
        for m in table
        if m.applies(eqn)
    ]


def keeping(
    closed: ClosedJaxpr, rng: np.random.Generator, first: int = 0
) -> tuple[Edit, str]:
    """A random edit that keeps the meaning, and its description.

    Args:
        closed: What is edited.
        rng: Chance.
        first: Of how many results all equations stay in front of the others, as
            differentiation has them.
    """
    kind = rng.choice(["rules", "rules", "rules", "order", "outlined", "twins"])
    n = len(closed.jaxpr.eqns)
    seed = int(rng.integers(1 << 30))
    if kind == "order":
        return Edit(order=_reordered(closed, rng, first), seed=seed), "reordered"
    if kind == "outlined":
        first = int(rng.integers(n))
        last = int(rng.integers(first + 1, n + 1))
        return Edit(outlined=(first, last), seed=seed), "outlined into jit"
    if kind == "twins":
        pure = [i for i, e in enumerate(closed.jaxpr.eqns) if not e.effects]
        chosen = rng.choice(pure, min(3, len(pure)), replace=False)
        twins = frozenset(map(int, chosen))
        return Edit(twins=twins, first=first, seed=seed), "computed twice"
    edit = _random_rules(closed, KEEP, int(rng.integers(1, 4)), rng, seed)
    return edit, _describe(edit, closed)


def changing(closed: ClosedJaxpr, rng: np.random.Generator) -> tuple[Edit, str]:
    """A random edit that changes the meaning, and its description."""
    edit = _random_rules(closed, CHANGE, 1, rng, int(rng.integers(1 << 30)))
    return edit, _describe(edit, closed)


def _random_rules(closed, table, count, rng, seed) -> Edit:
    by_name: dict[str, list[tuple[int, Mutation]]] = {}
    for i, m in mutations_at(closed, table):
        by_name.setdefault(m.name, []).append((i, m))
    rules: dict[int, list[Mutation]] = {}
    for name in rng.choice(sorted(by_name), count) if by_name else ():
        options = by_name[name]
        i, m = options[int(rng.integers(len(options)))]
        # Rules see the equation's own operands, so there is one per equation.
        rules[i] = [m]
    return Edit(rules=rules, seed=seed)


def _describe(edit: Edit, closed: ClosedJaxpr) -> str:
    return ", ".join(
        f"{m.name} at {i} {closed.jaxpr.eqns[i].primitive.name}"
        for i, ms in sorted(edit.rules.items())
        for m in ms
    )


def _reordered(closed: ClosedJaxpr, rng: np.random.Generator, first: int) -> list[int]:
    """A random order in which every equation follows what it reads."""
    eqns = closed.jaxpr.eqns
    maker = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    waiting = {
        i: {maker[v] for v in e.invars if not isinstance(v, Literal) and v in maker}
        for i, e in enumerate(eqns)
    }
    early, stack = set(), list(closed.jaxpr.outvars[:first])
    while stack:
        v = stack.pop()
        if not isinstance(v, Literal) and v in maker and maker[v] not in early:
            early.add(maker[v])
            stack += eqns[maker[v]].invars
    order: list[int] = []
    while waiting:
        ready = sorted(i for i, needs in waiting.items() if not needs)
        ready = [i for i in ready if i in early] or ready
        i = int(rng.choice(ready))
        order.append(i)
        del waiting[i]
        for needs in waiting.values():
            needs.discard(i)
    return order


# ------------------------------------------------------------------ tables
def _float(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating)


def _one_float(eqn: JaxprEqn) -> bool:
    return len(eqn.outvars) == 1 and _float(eqn.outvars[0])


def _one(eqn: JaxprEqn) -> bool:
    dtype = getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    # Random keys have a dtype of their own kind.
    return len(eqn.outvars) == 1 and getattr(dtype, "kind", "O") in "fiubV"


def _array(eqn: JaxprEqn, rank: int = 1) -> bool:
    return _one(eqn) and len(eqn.outvars[0].aval.shape) >= rank


def _named(*names: str) -> Callable[[JaxprEqn], bool]:
    return lambda eqn: eqn.primitive.name in names


def _on_result(fn: Callable) -> Rule:
    """A rule that changes the result alone."""
    return lambda eqn, values, rng: [fn(values[-1], rng)]


def _on_operands(fn: Callable) -> Rule:
    """A rule of the operands; the equation's own result is not needed."""
    return lambda eqn, values, rng: [fn(*values[: len(eqn.invars)])]


def _transposed_twice(x, rng):
    order = tuple(int(i) for i in rng.permutation(x.ndim))
    return lax.transpose(lax.transpose(x, order), tuple(np.argsort(order)))


def _unit_axis(x, rng):
    axis = int(rng.integers(x.ndim + 1))
    return jnp.squeeze(jnp.expand_dims(x, axis), axis)


def _two_slices(x, rng):
    axis = int(rng.integers(x.ndim))
    if x.shape[axis] < 2:
        return x
    at = int(rng.integers(1, x.shape[axis]))
    return jnp.concatenate(jnp.split(x, [at], axis=axis), axis=axis)


def _exchange_dot(eqn, values, rng):
    a, b = values[:2]
    ((ca, cb), (ba, bb)) = eqn.params["dimension_numbers"]
    out = lax.dot_general(
        b, a, ((cb, ca), (bb, ba)), precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )  # fmt: skip
    batch, own_a = len(ba), a.ndim - len(ca) - len(ba)
    own_b = b.ndim - len(cb) - len(bb)
    order = [
        *range(batch),
        *range(batch + own_b, batch + own_b + own_a),
        *range(batch, batch + own_b),
    ]
    return [lax.transpose(out, order)]


def _permute_dot_operand(eqn, values, rng):
    operands = list(values[:2])
    contract, batch = (list(map(list, p)) for p in eqn.params["dimension_numbers"])
    side = int(rng.integers(2))
    x = operands[side]
    order = [int(i) for i in rng.permutation(x.ndim)]
    place = {axis: new for new, axis in enumerate(order)}
    # Free axes must keep their order, for the result to be the same.
    used = set(contract[side]) | set(batch[side])
    free = [i for i in order if i not in used]
    for slot, axis in zip(free, sorted(free), strict=True):
        place[axis] = order.index(slot)
    order = [a for a, _ in sorted(place.items(), key=lambda kv: kv[1])]
    operands[side] = lax.transpose(x, order)
    contract[side] = [place[i] for i in contract[side]]
    batch[side] = [place[i] for i in batch[side]]
    return [
        lax.dot_general(
            *operands, (tuple(map(tuple, contract)), tuple(map(tuple, batch))),
            precision=eqn.params["precision"],
            preferred_element_type=eqn.params["preferred_element_type"],
        )
    ]  # fmt: skip


def _scale_through_dot(eqn, values, rng):
    a, b = values[:2]
    return [bind(eqn, [a * jnp.asarray(2, a.dtype), b])[0] * 0.5]


def _scale_operands_apart(eqn, values, rng):
    a, b = values[:2]
    return bind(eqn, [a * jnp.asarray(4, a.dtype), b * jnp.asarray(0.25, b.dtype)])


def _literal_factor(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name in ("mul", "div")
        and _one_float(eqn)
        and any(isinstance(v, Literal) for v in eqn.invars)
    )


def _split_factor(eqn, values, rng):
    x, c = values[:2]
    if isinstance(eqn.invars[0], Literal) and eqn.primitive.name == "mul":
        x, c = c, x
    if isinstance(eqn.invars[0], Literal) and eqn.primitive.name == "div":
        return [2 * ((x / 2) / c)]
    half = bind(eqn, [x, c * 0.5] if eqn.primitive.name == "mul" else [x, c * 2])
    return [half[0] * 2]


def _reduce_transposed(eqn, values, rng):
    x = values[0]
    order = [int(i) for i in rng.permutation(x.ndim)]
    axes = eqn.params["axes"]
    kept = [i for i in order if i not in axes]
    name = {"reduce_sum": jnp.sum, "reduce_max": jnp.max}[eqn.primitive.name]
    out = name(lax.transpose(x, order), tuple(order.index(a) for a in axes))
    return [lax.transpose(out, tuple(np.argsort(kept)))]


def _broadcast_in_two(eqn, values, rng):
    x, shape = values[0], eqn.params["shape"]
    dims = eqn.params["broadcast_dimensions"]
    unit = [x.shape[dims.index(i)] if i in dims else 1 for i in range(len(shape))]
    return [jnp.broadcast_to(lax.broadcast_in_dim(x, unit, dims), shape)]


def _is_product_with_itself(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "mul"
        and _one_float(eqn)
        and eqn.invars[0] is eqn.invars[1]
    )


def _two_cases(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "select_n"
        and len(eqn.invars) == 3
        and eqn.invars[0].aval.dtype == bool
    )


def _square(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def _integer_comparison(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in FLIPPED and not _float(eqn.invars[0])


FLIPPED = {
    "gt": (lax.lt, lax.le),
    "lt": (lax.gt, lax.ge),
    "ge": (lax.le, lax.lt),
    "le": (lax.ge, lax.gt),
}


def _negated_comparison(eqn, values, rng):
    # a > b is not (a <= b), which holds for integers.
    return [~FLIPPED[eqn.primitive.name][1](*values[:2])]


def _inexact(eqn: JaxprEqn) -> bool:
    return _one_float(eqn)


KEEP: tuple[Mutation, ...] = (
    # of any result
    Mutation("transposed twice", lambda e: _array(e, 2), _on_result(_transposed_twice)),
    Mutation("flattened and back", _array, _on_result(
        lambda x, rng: x.reshape(-1).reshape(x.shape))),
    Mutation("unit axis and back", _one, _on_result(_unit_axis)),
    Mutation("copied", _one, _on_result(lambda x, rng: jnp.array(x, copy=True))),
    Mutation("barrier", _one, _on_result(lambda x, rng: lax.optimization_barrier(x))),
    Mutation("named", _one_float, _on_result(
        lambda x, rng: checkpoint_name(x, "mutant"))),
    Mutation("jitted identity", _one, _on_result(
        lambda x, rng: jax.jit(lambda y: y + 0)(x) if x.dtype != bool else x)),
    Mutation("times one", _one_float, _on_result(lambda x, rng: x * 1.0)),
    Mutation("one times", _one_float, _on_result(lambda x, rng: 1.0 * x)),
    Mutation("over one", _one_float, _on_result(lambda x, rng: x / 1.0)),
    Mutation("plus zero", _one_float, _on_result(lambda x, rng: x + 0.0)),
    Mutation("minus zero", _one_float, _on_result(lambda x, rng: x - 0.0)),
    Mutation("plus zeros", _one_float, _on_result(
        lambda x, rng: jnp.zeros(x.shape, x.dtype) + x)),
    Mutation("negated twice", _one_float, _on_result(lambda x, rng: jnp.negative(-x))),
    Mutation("half and double", _one_float, _on_result(lambda x, rng: x * 0.5 * 2.0)),
    Mutation("reversed twice", _array, _on_result(
        lambda x, rng: jnp.flip(jnp.flip(x, 0), 0))),
    Mutation("inverted twice", lambda e: _one(e) and e.outvars[0].aval.dtype == bool,
             _on_result(lambda x, rng: jnp.logical_not(~x))),
    # of one primitive
    Mutation("operands exchanged", _named(
        "add", "mul", "max", "min", "and", "or", "eq", "ne", "add_any"),
        lambda e, v, rng: bind(e, [v[1], v[0]])),
    Mutation("comparison flipped", _named(*FLIPPED), lambda e, v, rng: [
        FLIPPED[e.primitive.name][0](*jnp.broadcast_arrays(v[1], v[0]))]),
    Mutation("comparison negated", _integer_comparison, _negated_comparison),
    Mutation("plus negative", _named("sub"), _on_operands(lambda x, y: x + (-y))),
    Mutation("negative difference", _named("sub"), _on_operands(
        lambda x, y: -(y - x))),
    Mutation("times reciprocal", lambda e: _named("div")(e) and _one_float(e),
             _on_operands(lambda x, y: x * (1 / y))),
    Mutation("reciprocal times", lambda e: _named("div")(e) and _one_float(e),
             _on_operands(lambda x, y: jnp.reciprocal(jnp.asarray(y)) * x)),
    Mutation("arms exchanged", _two_cases, lambda e, v, rng: [
        lax.select_n(~jnp.asarray(v[0]), v[2], v[1])]),
    Mutation("arms by where", _two_cases, lambda e, v, rng: [
        jnp.where(v[0], v[2], v[1])]),
    Mutation("exp2", _named("exp"), _on_operands(
        lambda x: jnp.exp2(x * math.log2(math.e)))),
    Mutation("dot exchanged", _named("dot_general"), _exchange_dot),
    Mutation("dot operand permuted", _named("dot_general"), _permute_dot_operand),
    Mutation("scale through dot", _named("dot_general"), _scale_through_dot),
    Mutation("scales apart", _named("dot_general"), _scale_operands_apart),
    Mutation("factor split", _literal_factor, _split_factor),
    Mutation("reduced transposed", _named("reduce_sum", "reduce_max"),
             _reduce_transposed),
    Mutation("broadcast in two", _named("broadcast_in_dim"), _broadcast_in_two),
    Mutation("product for square", _square, _on_operands(lambda x: x * x)),
    Mutation("power for square", _square, _on_operands(lambda x: jnp.power(x, 2))),
    Mutation("square for product", _is_product_with_itself,
             _on_operands(lambda x, _: jnp.square(x))),
    Mutation("root inverted", _named("rsqrt"), _on_operands(
        lambda x: 1 / jnp.sqrt(x))),
    Mutation("power for inverse root", _named("rsqrt"), _on_operands(
        lambda x: x**-0.5)),
    Mutation("power for root", _named("sqrt"), _on_operands(lambda x: x**0.5)),
    Mutation("sigmoid written", _named("logistic"), _on_operands(
        lambda x: 1 / (1 + jnp.exp(-x)))),
    Mutation("sigmoid by tanh", _named("logistic"), _on_operands(
        lambda x: 0.5 * (1 + jnp.tanh(0.5 * x)))),
)  # fmt: skip


# -------------------------------------------------------- meaning-changing
def _equal_axes(x) -> list[tuple[int, int]]:
    return [
        (i, j) for i in range(x.ndim) for j in range(i) if x.shape[i] == x.shape[j] > 1
    ]


def _swap_equal_axes(x, rng):
    pairs = _equal_axes(x)
    if not pairs:
        return jnp.roll(x, 1, axis=int(rng.integers(x.ndim)))
    return jnp.swapaxes(x, *pairs[int(rng.integers(len(pairs)))])


def _mixed(x, rng):
    """Axes transposed, then read in the old shape."""
    order = [int(i) for i in rng.permutation(x.ndim)]
    return lax.transpose(x, order).reshape(x.shape)


def _ramp(x, rng):
    axis = int(rng.integers(x.ndim))
    shape = [x.shape[axis] if i == axis else 1 for i in range(x.ndim)]
    return jnp.linspace(0.5, 1.5, x.shape[axis], dtype=x.dtype).reshape(shape)


def _other_axis(eqn, values, rng):
    """The reduction over another axis, laid out as the right one would be."""
    x, out = values[0], values[-1]
    axes = tuple(int(a) for a in rng.permutation(x.ndim)[: len(eqn.params["axes"])])
    name = {"reduce_sum": jnp.sum, "reduce_max": jnp.max}[eqn.primitive.name]
    other = name(x, axes)
    if other.shape == out.shape:
        return [other]
    return [jnp.broadcast_to(other.mean().astype(out.dtype), out.shape)]


def _other_operand(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name in ("mul", "add", "sub", "div", "dot_general")
        and len(eqn.invars) == 2
        and eqn.invars[0].aval.shape == eqn.invars[1].aval.shape
        and _one_float(eqn)
    )


def _has_literal(eqn: JaxprEqn) -> bool:
    return _one_float(eqn) and any(
        isinstance(v, Literal) and _float(v) for v in eqn.invars
    )


def _other_literal(eqn, values, rng):
    literals = [
        i for i, v in enumerate(eqn.invars) if isinstance(v, Literal) and _float(v)
    ]
    i = int(rng.choice(literals))
    values = list(values[: len(eqn.invars)])
    by = float(rng.choice([0.5, 1.5, 2.0, -1.0]))
    value = float(values[i])
    # A fill close to the largest number stays finite.
    plain = value and abs(value) < 1e30
    values[i] = np.asarray(by * value if plain else 0.37, eqn.invars[i].aval.dtype)
    return bind(eqn, values)


def _index_off_by_one(eqn: JaxprEqn) -> bool:
    return _one(eqn) and eqn.primitive.name in ("iota", "add", "sub", "mul", "cumsum") \
        and eqn.outvars[0].aval.dtype == jnp.int32  # fmt: skip


STRICT = {"gt": lax.ge, "ge": lax.gt, "lt": lax.le, "le": lax.lt, "eq": lax.ne,
          "ne": lax.eq}  # fmt: skip

CHANGE: tuple[Mutation, ...] = (
    # of any result
    Mutation("axes exchanged", _array, _on_result(_swap_equal_axes)),
    Mutation("axes mixed", lambda e: _array(e, 2), _on_result(_mixed)),
    Mutation("reversed", _array, _on_result(
        lambda x, rng: jnp.flip(x, int(rng.integers(x.ndim))))),
    Mutation("rolled", _array, _on_result(
        lambda x, rng: jnp.roll(x, 1, int(rng.integers(x.ndim))))),
    Mutation("stopped", _one_float, _on_result(lambda x, rng: lax.stop_gradient(x))),
    Mutation("doubled", _one_float, _on_result(lambda x, rng: x * 2)),
    Mutation("shifted", _one_float, _on_result(lambda x, rng: x + 0.25)),
    Mutation("squared", _one_float, _on_result(lambda x, rng: x * jnp.abs(x))),
    Mutation("ramp", lambda e: _array(e) and _float(e.outvars[0]),
             _on_result(lambda x, rng: x * _ramp(x, rng))),
    Mutation("ramp added", lambda e: _array(e) and _float(e.outvars[0]),
             _on_result(lambda x, rng: x + _ramp(x, rng))),
    Mutation("accumulated", lambda e: _array(e) and _float(e.outvars[0]),
             _on_result(lambda x, rng: jnp.cumsum(x, int(rng.integers(x.ndim))))),
    Mutation("capped", _one_float, _on_result(lambda x, rng: jnp.minimum(x, 0.4))),
    Mutation("bounded below", _one_float, _on_result(
        lambda x, rng: jnp.maximum(x, 0.1))),
    Mutation("rounded", _one_float, _on_result(
        lambda x, rng: jnp.round(x * 4) / 4)),
    Mutation("few bits", _one_float, _on_result(
        lambda x, rng: lax.reduce_precision(x, 5, 2))),
    Mutation("mean subtracted", lambda e: _array(e) and _float(e.outvars[0]),
             _on_result(lambda x, rng: x - jnp.mean(jnp.where(
                 jnp.isfinite(x), x, 0), int(rng.integers(x.ndim)), keepdims=True))),
    # of one primitive
    Mutation("other literal", _has_literal, _other_literal),
    Mutation("reduced over another axis", _named("reduce_sum", "reduce_max"),
             _other_axis),
    Mutation("operands exchanged", lambda e: _other_operand(e) and
             e.primitive.name in ("sub", "div", "dot_general"),
             lambda e, v, rng: _as(e, bind(e, [v[1], v[0]])[0])),
    Mutation("first operand twice", _other_operand,
             lambda e, v, rng: _as(e, bind(e, [v[0], v[0]])[0]) if
             _same_dims(e) else [v[-1]]),
    Mutation("difference for sum", _named("add"), _on_operands(
        lambda x, y: x - y if x is not True else x)),
    Mutation("sum for difference", _named("sub"), _on_operands(lambda x, y: x + y)),
    Mutation("sum for product", lambda e: _named("mul")(e) and _one_float(e),
             _on_operands(lambda x, y: x + y)),
    Mutation("product for quotient", lambda e: _named("div")(e) and _one_float(e),
             _on_operands(lambda x, y: x * y)),
    Mutation("exp of double", _named("exp"), _on_operands(lambda x: jnp.exp(2 * x))),
    Mutation("exp2 unscaled", _named("exp"), _on_operands(jnp.exp2)),
    Mutation("softplus for exp", _named("exp"), _on_operands(jax.nn.softplus)),
    Mutation("root for inverse root", _named("rsqrt"), _on_operands(jnp.sqrt)),
    Mutation("reciprocal for inverse root", _named("rsqrt"), _on_operands(
        lambda x: 1 / x)),
    Mutation("inverse root for root", _named("sqrt"), _on_operands(lax.rsqrt)),
    Mutation("tanh for sigmoid", _named("logistic"), _on_operands(jnp.tanh)),
    Mutation("sigmoid for tanh", _named("tanh"), _on_operands(jax.nn.sigmoid)),
    Mutation("sine for tanh", _named("tanh"), _on_operands(jnp.sin)),
    Mutation("erf for tanh", _named("tanh"), _on_operands(lax.erf)),
    Mutation("minimum for maximum", _named("max"), _on_operands(jnp.minimum)),
    Mutation("absolute for square", _square, _on_operands(jnp.abs)),
    Mutation("cube for square", _square, _on_operands(lambda x: x * x * x)),
    Mutation("predicate dropped", _two_cases, lambda e, v, rng: [
        jnp.broadcast_to(v[2], v[-1].shape)]),
    Mutation("predicate negated", _two_cases, lambda e, v, rng: [
        lax.select_n(~jnp.asarray(v[0]), v[1], v[2])]),
    Mutation("first of two predicates", lambda e: _named("and", "or")(e) and
             e.outvars[0].aval.dtype == bool, lambda e, v, rng: [
                 jnp.broadcast_to(v[0], v[-1].shape)]),
    Mutation("other joint", lambda e: _named("and", "or")(e) and
             e.outvars[0].aval.dtype == bool, lambda e, v, rng: [
                 v[0] | v[1] if e.primitive.name == "and" else v[0] & v[1]]),
    Mutation("strictness", _named(*STRICT), lambda e, v, rng: [
        STRICT[e.primitive.name](*jnp.broadcast_arrays(v[0], v[1]))]),
    Mutation("index off by one", _index_off_by_one, _on_result(
        lambda x, rng: x + 1)),
    Mutation("index doubled", _index_off_by_one, _on_result(lambda x, rng: x * 2)),
)  # fmt: skip


def _same_dims(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return True
    ((ca, cb), (ba, bb)) = eqn.params["dimension_numbers"]
    return ca == cb and ba == bb


def _as(eqn: JaxprEqn, x: jax.Array) -> Values:
    """The value in the shape that the equation's readers expect."""
    return [jnp.reshape(x, eqn.outvars[0].aval.shape)]
