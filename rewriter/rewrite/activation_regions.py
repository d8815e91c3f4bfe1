"""Finds elementwise equations between products: activations, and their gradients.

    u = x·w + b      h = gelu(u)              y = h·v         forward
    dh = dy·vᵀ       du = dh * gelu'(u)       dx = du·wᵀ      backward

A region begins at what is in memory anyway, such as u and dh, and ends at what
products read, such as h and du. Values in between are computed again where a gradient
needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rewriter import _jax
from rewriter.ops.elementwise_program import ElementwiseProgram
from rewriter.ops.row_program import FULL
from rewriter.program.contents import contents_of
from rewriter.program.equations import Equations
from rewriter.program.loops import inserted
from rewriter.rewrite.short_erfc import short_erfc

SIXTEEN = ("bfloat16", "float16")

FUNCTIONS = frozenset({"erf", "erfc", "tanh", "logistic", "log1p", "exp"})
"""Primitives that take time. A region has one of them."""

OTHERS = frozenset({
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type",
    "copy", "copy_p", "div", "eq", "expm1", "ge", "gt", "integer_pow", "is_finite",
    "le", "log", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square",
    "or", "rsqrt", "select_n", "sign", "sqrt", "square", "sub",
})  # fmt: skip
"""The other primitives of regions."""

CALLS = ("pjit", "jit")
INNER = {**dict.fromkeys(CALLS, "jaxpr"), "custom_jvp_call": "call_jaxpr"}
"""Primitives that call another jaxpr, and the parameter that holds it."""

BARRIER = "optimization_barrier"
REPEATED = "broadcast_in_dim"

MOST_ARRAYS = 3
"""The most arrays that a region reads."""


@dataclass(frozen=True)
class Region:
    """Elementwise equations that one kernel computes.

    Attributes:
        inputs: The arrays that they read, of 16 bits and one shape.
        out: What they give.
        total: The sum of that over all axes but the last, or None.
        positions: Where the equations are.
        behind: Inputs that are read behind a barrier too: that value, and the input.
    """

    inputs: tuple[Any, ...]
    out: Any
    total: Any
    positions: frozenset[int]
    behind: tuple[tuple[Any, Any], ...] = ()

    @property
    def outputs(self) -> list[Any]:
        """What is given: the array, and maybe its sum."""
        return [self.out] if self.total is None else [self.out, self.total]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        shape = self.out.aval.shape
        return math.prod(shape[:-1]), shape[-1]


def regions(
    equations: Equations, least: int, takes: Callable[[Region], bool]
) -> list[Region]:
    """Returns the regions of a body, in order.

    Args:
        equations: The body.
        least: The fewest bytes of their arrays.
        takes: Whether a region is computed by a kernel.
    """
    found = []
    for at, eqn in enumerate(equations.eqns):
        if _is_large(eqn, least) and _is_multiplied(equations, eqn.outvars[0]):
            region = _region(equations, at)
            found += [region] if region is not None and takes(region) else []
    while True:
        inside = frozenset[int]().union(*(r.positions for r in found))
        kept = [r for r in found if _is_closed(equations, r, inside)]
        if len(kept) == len(found):
            return found
        found = kept


def multiplies_16_bits(body: Any) -> bool:
    """Whether a product or site of a body reads an array of 16 bits.

    Most programs of float32 have none: nothing else needs to be looked at.
    """
    held = contents_of(body)
    reading = {p for p in held.primitives if _reads_in_memory(p.name)}
    return any(getattr(d, "itemsize", 0) == 2 for d in held.dtypes_read(reading))


def _reads_in_memory(name: str) -> bool:
    return name in READERS or name.startswith("rewriter_")


def without_calls(body: Any) -> Any:
    """Returns a body with the equations of elementwise jitted functions in it.

    It is returned as it is if nothing in it multiplies arrays of 16 bits.

    JAX's own activations are jitted. Their results are in memory only if products read
    them, which the function itself does not show.
    """
    if not multiplies_16_bits(body):
        return body
    while any(map(_is_elementwise_call, body.eqns)):
        body = _without_calls_at_its_top(body)
    return body


def _without_calls_at_its_top(body: Any) -> Any:
    known: dict[Any, Any] = {}
    eqns = []
    for old in body.eqns:
        eqn = _jax.reading(old, known)
        if not _is_elementwise_call(old):
            eqns.append(eqn)
            continue
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        made, results = inserted(inner, eqn.invars, eqn.source_info)
        eqns += made
        known.update(zip(old.outvars, results, strict=True))
    outs = getattr(body, "jaxpr", body).outvars
    outs = [v if _jax.is_literal(v) else known.get(v, v) for v in outs]
    return _jax.with_equations(body, eqns, outs)


def without_unread(body: Any) -> Any:
    """Returns a body without equations of numbers whose results nothing reads."""
    outs = getattr(body, "jaxpr", body).outvars
    read = {v for v in outs if not _jax.is_literal(v)}
    kept = []
    for eqn in reversed(body.eqns):
        if not _is_of_numbers(eqn) or read.intersection(eqn.outvars):
            kept.append(eqn)
            read.update(v for v in eqn.invars if not _jax.is_literal(v))
    if len(kept) == len(body.eqns):
        return body
    return _jax.with_equations(body, kept[::-1], outs)


def _is_elementwise_call(eqn: Any) -> bool:
    """Whether an equation calls a jitted function of elementwise equations alone."""
    if eqn.primitive.name not in CALLS or eqn.effects:
        return False
    closed = eqn.params["jaxpr"]
    inner = getattr(closed, "jaxpr", closed)
    if getattr(closed, "consts", ()) or inner.constvars or not inner.eqns:
        return False
    return all(
        _is_elementwise_call(e) or _names(e) <= FUNCTIONS | OTHERS for e in inner.eqns
    )


def form_of(equations: Equations, region: Region) -> Any:
    """Returns what is equal for regions that compute the same of their inputs.

    Equations count with their primitives, parameters and literals, values by number.
    A region with a parameter that cannot be compared is equal to none.
    """
    numbers = {v: i for i, v in enumerate(region.inputs)}
    numbers |= {behind: numbers[v] for behind, v in region.behind}
    form: list[Any] = [str(v.aval.dtype) for v in region.inputs]
    for place in sorted(region.positions):
        eqn = equations.eqns[place]
        ins = [
            (np.asarray(v.val).tobytes(), str(v.aval.dtype)) if _jax.is_literal(v)
            else numbers[v]
            for v in eqn.invars
        ]  # fmt: skip
        out = eqn.outvars[0]
        numbers[out] = len(numbers)
        params = tuple(sorted(eqn.params.items()))
        form.append((eqn.primitive, tuple(ins), params, str(out.aval.dtype)))
    made = (*form, numbers[region.out])
    try:
        hash(made)
    except TypeError:
        return object()
    return made


def program_of(
    equations: Equations, region: Region, sums: bool
) -> ElementwiseProgram | None:
    """Returns what a region computes, or None if that cannot be said of scalars.

    Args:
        equations: The body.
        region: The region.
        sums: Whether sums over rows are computed too.
    """
    own = [equations.eqns[i] for i in sorted(region.positions)]
    scalar = jax.ShapeDtypeStruct((), np.float32)

    def function(*values: Any) -> Any:
        known = dict(zip(region.inputs, values, strict=True))
        known |= {behind: known[var] for behind, var in region.behind}
        _apply(own, known)
        return known[region.out]

    try:
        scalars = jax.make_jaxpr(function)(*(scalar for _ in region.inputs))
    except (NotImplementedError, TypeError, ValueError):
        return None
    if [str(v.aval.dtype) for v in scalars.jaxpr.outvars] != ["float32"]:
        return None
    dtypes = tuple((FULL, str(v.aval.dtype)) for v in region.inputs)
    out = str(region.out.aval.dtype)
    return ElementwiseProgram(dtypes, out, sums, _text(scalars), scalars)


def _text(scalars: Any) -> str:
    """A jaxpr as text, with all digits of its numbers."""
    numbers = [
        repr(np.asarray(v.val).item())
        for eqn in scalars.jaxpr.eqns
        for v in eqn.invars
        if _jax.is_literal(v)
    ]
    return f"{scalars} {numbers} {[repr(c) for c in scalars.consts]}"


def _apply(eqns: Sequence[Any], known: dict[Any, Any]) -> None:
    """Computes equations of float32 scalars, whatever floats the program has there."""

    def read(atom: Any) -> Any:
        if not _jax.is_literal(atom):
            return known[atom]
        value = np.asarray(atom.val)
        if _is_float(atom.aval.dtype):
            return value.astype(np.float32)[()]
        return value[()]

    for eqn in eqns:
        values, name = [read(v) for v in eqn.invars], eqn.primitive.name
        (out,) = eqn.outvars
        if name in INNER:
            closed = eqn.params[INNER[name]]
            inner = getattr(closed, "jaxpr", closed)
            consts = getattr(closed, "consts", ())
            own = dict(zip(inner.invars, values, strict=True))
            own |= dict(zip(inner.constvars, consts, strict=True))
            _apply(inner.eqns, own)
            (last,) = inner.outvars
            known[out] = own[last] if not _jax.is_literal(last) else read(last)
        elif name in ("copy", "copy_p", REPEATED):
            known[out] = values[0]
        elif name == "convert_element_type" and _is_float(out.aval.dtype):
            flag = str(eqn.invars[0].aval.dtype) == "bool"
            known[out] = jax.numpy.float32(values[0]) if flag else values[0]
        elif name == "erfc":
            known[out] = short_erfc(values[0])
        else:
            known[out] = eqn.primitive.bind(*values, **eqn.params)


def _is_float(dtype: Any) -> bool:
    return str(dtype) in ("float32", *SIXTEEN)


# ----------------------------------------------------------------- where they are
def _region(equations: Equations, at: int) -> Region | None:
    """The region that ends at an equation, if there is one."""
    out = equations.eqns[at].outvars[0]
    inputs: dict[Any, None] = {}
    positions, queue, names = set[int](), [out], set[str]()
    while queue:
        var = queue.pop()
        place = equations.made_at(var)
        eqn = equations.eqns[place] if place >= 0 else None
        if var is not out and _is_in_memory(equations, var):
            inputs[var] = None
        elif eqn is None or not _is_elementwise(eqn):
            return None
        elif place not in positions:
            positions.add(place)
            names |= _names(eqn)
            queue += [v for v in eqn.invars if not _jax.is_literal(v)]
    behind = {v: _before_barrier(equations, v) for v in inputs}
    behind = {v: first for v, first in behind.items() if first in inputs}
    inputs = {v: None for v in inputs if v not in behind}
    alike = {(v.aval.shape, str(v.aval.dtype) in SIXTEEN) for v in (*inputs, out)}
    if alike != {(out.aval.shape, True)} or not 0 < len(inputs) <= MOST_ARRAYS:
        return None
    if not names & FUNCTIONS:
        return None
    order, total = sorted(inputs, key=equations.made_at), _total(equations, out)
    same = tuple(behind.items())
    return Region(tuple(order), out, total, frozenset(positions), same)


def _before_barrier(equations: Equations, var: Any) -> Any:
    """What a barrier makes a value of; None if none does."""
    eqn = equations.maker(var)
    if eqn is None or eqn.primitive.name != BARRIER:
        return None
    return eqn.invars[eqn.outvars.index(var)]


def _total(equations: Equations, out: Any) -> Any:
    """The sum of a result over all axes but the last, in its dtype; None if none is."""
    axes = tuple(range(len(out.aval.shape) - 1))
    for place in equations.readers(out):
        if place == equations.end:
            continue
        eqn = equations.eqns[place]
        if eqn.primitive.name == "reduce_sum" and tuple(eqn.params["axes"]) == axes:
            return eqn.outvars[0]
    return None


def _is_closed(equations: Equations, region: Region, inside: frozenset[int]) -> bool:
    """Whether nothing but regions reads what is between their ends."""
    for place in region.positions:
        (var,) = equations.eqns[place].outvars
        if var is not region.out and not inside.issuperset(equations.readers(var)):
            return False
    return True


def _is_large(eqn: Any, least: int) -> bool:
    if len(eqn.outvars) != 1 or not _is_elementwise(eqn):
        return False
    aval = eqn.outvars[0].aval
    return math.prod(aval.shape) * aval.dtype.itemsize >= least


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation is of numbers of one shape, of known sizes, and literals."""
    if not _is_of_numbers(eqn):
        return False
    shape = getattr(eqn.outvars[0].aval, "shape", ())
    known = bool(shape) and all(isinstance(n, int) for n in shape)
    if eqn.primitive.name == REPEATED and not _jax.is_literal(eqn.invars[0]):
        return False
    return known and all(
        v.aval.shape == (() if _jax.is_literal(v) else shape) for v in eqn.invars
    )


def _is_of_numbers(eqn: Any) -> bool:
    """Whether an equation has one result, of primitives that regions may have."""
    allowed = FUNCTIONS | OTHERS
    return len(eqn.outvars) == 1 and not eqn.effects and _names(eqn) <= allowed


def _names(eqn: Any) -> frozenset[str]:
    """The primitives of an equation, those of inner jaxprs included."""
    name = eqn.primitive.name
    if name not in INNER:
        return frozenset({name})
    inner = getattr(eqn.params[INNER[name]], "jaxpr", eqn.params[INNER[name]])
    alike = all(len(e.outvars) == 1 for e in inner.eqns)
    found = frozenset[str]().union(*(_names(e) for e in inner.eqns))
    return found if alike else found | {name}


def _is_in_memory(equations: Equations, var: Any) -> bool:
    """Whether XLA writes a value: inputs, products, and what others read."""
    eqn = equations.maker(var)
    if eqn is None or _is_product(equations, var):
        return True
    if not _is_elementwise(eqn):
        return eqn.primitive.name.startswith("rewriter_") or (
            eqn.primitive.name == BARRIER
        )
    return _is_read_by_others(equations, var)


def _is_product(equations: Equations, var: Any) -> bool:
    """Whether a value is a product, maybe with a bias, rounded, or in another shape."""
    eqn = equations.maker(var)
    if eqn is None:
        return False
    name = eqn.primitive.name
    if name in ("convert_element_type", "reshape", "copy", "copy_p", "squeeze"):
        return _is_product(equations, eqn.invars[0])
    if name == "add":
        first, second = eqn.invars
        for x, bias in ((first, second), (second, first)):
            if _is_bias(equations, bias, var.aval.shape[-1]):
                return not _jax.is_literal(x) and _is_product(equations, x)
    return name == "dot_general"


def _is_bias(equations: Equations, atom: Any, columns: int) -> bool:
    """Whether a value is a number for each column, maybe repeated for each row."""
    if _jax.is_literal(atom):
        return False
    while math.prod(atom.aval.shape) > columns:
        eqn = equations.maker(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        atom = eqn.invars[0]
    return math.prod(atom.aval.shape) == columns


READERS = ("dot_general", "reduce_sum", "conv_general_dilated")
MOVES = ("reshape", "squeeze", "transpose", "copy", "copy_p", "name")


def _is_multiplied(equations: Equations, var: Any) -> bool:
    """Whether products read a value, and nothing does that XLA might append to it."""
    multiplied = False
    for place in equations.readers(var):
        if place == equations.end:
            continue
        eqn = equations.eqns[place]
        name = eqn.primitive.name
        if name in MOVES and not _is_elementwise(eqn):
            if not _is_multiplied(equations, eqn.outvars[0]):
                return False
            multiplied = True
        elif not _is_elementwise(eqn):
            if not _reads_in_memory(name):
                return False
            multiplied |= name != "reduce_sum"
    return multiplied


def _is_read_by_others(equations: Equations, var: Any) -> bool:
    """Whether an equation that is not elementwise reads a value, or the body's end."""
    return any(
        place == equations.end or not _is_elementwise(equations.eqns[place])
        for place in equations.readers(var)
    )
