"""Rewritten programs hold their own equations, and what the list allows, and no more.

Each equation in front of, between and behind sites is one of the original's, layout, an
exact cast, or of an entry of `recomputable`. The tests walk the spellings and random
programs.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import rewriter
from rewriter.find import recomputable
from tests.soundness import passes, values
from tests.soundness.grammar import KINDS, program
from tests.spellings.corpus import SPELLINGS

SITES = {"rewriter_site", "rewriter_site_on_devices"}
LAYOUT = {"concatenate", "rev", "slice", "dynamic_slice"}
AT_ANY_PLACE = {
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "reshape",
    "squeeze",
    "transpose",
}
"""Layout of which a value keeps its name: what is made of it is the same numbers."""
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "remat2", "checkpoint",
}  # fmt: skip
PASSED = SITES | LAYOUT | {"cond", "scan", "while"}
PREPARED = {"dot_general", "reduce_sum"}
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _steps(operands: Sequence[Name]) -> list[Name]:
    """Names of what a loop's body is given: of one step, or the same for all."""
    return [("step", name) for name in operands]


BODIES_OF = {
    "scan": lambda params, given: [(params["jaxpr"], _steps(given))],
    "cond": lambda params, given: [(b, list(given[1:])) for b in params["branches"]],
    "while": lambda params, given: [
        (params["body_jaxpr"], _steps(given[params["cond_nconsts"] :]))
    ],
}
"""Bodies of loops and of branches, with the names of what they are given."""

Name = Any
"""What a value is: an input's or a constant's identity, or an equation's."""


@dataclass
class Names:
    """Numbers equations by what they compute: equal equations have equal numbers.

    Attributes:
        texts: The primitive, parameters and operands of each number.
        numbers: The number of each of these.
    """

    texts: list[tuple[str, str, tuple[Name, ...]]] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def of(self, eqn: Any, operands: tuple[Name, ...]) -> int:
        """The number of an equation."""
        params = str(sorted((k, str(v)) for k, v in _own_params(eqn).items()))
        params = re.sub(r"0x[0-9A-Fa-fX]+", "", params)  # of callbacks
        text = eqn.primitive.name, params, operands
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]


def _own_params(eqn: Any) -> dict[str, Any]:
    """Parameters that are no bodies; of positions only how many there are."""
    if eqn.primitive.name in BODIES_OF:
        return {}
    if eqn.primitive.name == "iota":
        return {"until": eqn.params["shape"][eqn.params["dimension"]]}
    return eqn.params


def equations(
    closed: Any, given: Sequence[Name], names: Names, found: list[tuple[int, Any]]
) -> list[Name]:
    """Adds a program's equations with their numbers, and gives its results' names."""
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    known: dict[Any, Name] = dict(zip(jaxpr.invars, given, strict=True))
    known.update(zip(jaxpr.constvars, map(_content, consts), strict=True))

    def read(atom: Any) -> Name:
        return _content(atom.val) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        if eqn.primitive.name in CALLS:
            body = next(eqn.params[k] for k in BODIES if k in eqn.params)
            results = equations(body, operands, names, found)
        elif eqn.primitive.name in BODIES_OF:
            inner = [
                equations(body, at, names, found)
                for body, at in BODIES_OF[eqn.primitive.name](eqn.params, operands)
            ]
            numbers = [names.of(eqn, of) for of in zip(*inner, strict=True)]
            found += [(number, eqn) for number in numbers]
            results = [(number, 0) for number in numbers]
        elif eqn.primitive.name in AT_ANY_PLACE:
            results = [operands[0]]
        else:
            number = names.of(eqn, operands)
            found.append((number, eqn))
            results = [(number, i) for i in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _content(value: Any) -> Name:
    array = np.squeeze(np.asarray(value))
    return "constant", str(array.dtype), array.shape, array.tobytes()


def new_equations(fn: Callable, fast: Callable, args: Sequence[Any]) -> Iterator[Any]:
    """Equations of a rewritten program that are neither layout nor the original's.

    Behind a site, and behind what is prepared for one, an equation is the original's if
    one has its other operands.
    """
    names, before, after = Names(), [], []
    for run, found in ((fn, before), (fast, after)):
        closed = jax.make_jaxpr(run)(*args)
        given = [("input", i) for i in range(len(closed.jaxpr.invars))]
        equations(closed, given, names, found)
    own = {number for number, _ in before}
    alike = defaultdict(list)
    for number in own:
        *kind, operands = names.texts[number]
        alike[tuple(kind)].append(operands)
    behind: set[int] = set()  # of sites
    is_behind = lambda name: isinstance(name[0], int) and name[0] in behind
    for number, eqn in after:
        *kind, operands = names.texts[number]
        prepared = number not in own and eqn.primitive.name in PREPARED
        if eqn.primitive.name in SITES or prepared or any(map(is_behind, operands)):
            behind.add(number)
        same = lambda others, mine=operands: all(
            is_behind(x) or x == y for x, y in zip(mine, others, strict=True)
        )
        if number in own or eqn.primitive.name in PASSED:
            continue
        if number not in behind or not any(map(same, alike[tuple(kind)])):
            yield eqn


# ------------------------------------------------------------- entries of the list
def _dtypes(eqn: Any) -> tuple[Any, list[Any]]:
    return eqn.outvars[0].aval.dtype, [v.aval.dtype for v in eqn.invars]


def _is(kind: Any, *dtypes: Any) -> bool:
    return all(jnp.issubdtype(d, kind) for d in dtypes)


def of_whole_numbers(eqn: Any) -> bool:
    """Whether an equation computes integers, or booleans, of integers and booleans."""
    out, given = _dtypes(eqn)
    return not any(_is(jnp.inexact, d) for d in (out, *given))


def of_numbers(eqn: Any) -> bool:
    """Whether an equation computes floats of at least 32 bits, or the program's."""
    out, given = _dtypes(eqn)
    return _is(jnp.floating, out, *given)


def is_exact_cast(eqn: Any) -> bool:
    """Whether each number of the one type is one of the other, or both are integers.

    Integers are positions and booleans, whose bounds are known.
    """
    out, (given,) = _dtypes(eqn)
    if _is(jnp.bool_, given) or of_whole_numbers(eqn):
        return True
    if isinstance(eqn.invars[0], Literal):
        return out.type(eqn.invars[0].val) == eqn.invars[0].val
    return jnp.promote_types(out, given) == out and out != given


ENTRIES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "iota": {"iota": of_whole_numbers},
    "val": dict.fromkeys(("add", "sub", "mul", "neg"), of_whole_numbers),
    "relu": {"max": of_whole_numbers},
    "clamp": dict.fromkeys(("min", "max", "clamp"), of_whole_numbers),
    "log": {"log": of_numbers},
    "ge": dict.fromkeys(("ge", "gt", "le", "lt"), of_whole_numbers),
    "eq": dict.fromkeys(("eq", "ne"), of_whole_numbers),
    "ind": {"not": of_whole_numbers, "and": of_whole_numbers, "or": of_whole_numbers},
    "any": {"reduce_or": of_whole_numbers, "reduce_and": of_whole_numbers},
    "leaf": dict.fromkeys(
        ("mul", "add", "sub", "neg", "integer_pow", "sqrt", "rsqrt"), of_numbers
    ),
    "choose": {"select_n": lambda eqn: True},
    "gather": {"gather": lambda eqn: True},
    "widen": {"convert_element_type": is_exact_cast},
    "sums_of_rows": {"reduce_sum": of_numbers},
    "differences_of_softmaxes": {"dot_general": of_numbers},
}
"""By entry, which primitives are code for it, and of which operands."""


def outside(fn: Callable, fast: Callable, args: Sequence[Any]) -> list[str]:
    """Equations of a rewritten program that no entry of the list covers."""
    return [
        str(eqn)
        for eqn in new_equations(fn, fast, args)
        if not any(
            eqn.primitive.name in of and of[eqn.primitive.name](eqn)
            for of in ENTRIES.values()
        )
    ]


def test_entries_are_those_of_the_list() -> None:
    lists = (recomputable.ALLOWED, recomputable.AROUND, recomputable.PREPARED)
    assert ENTRIES.keys() <= set().union(*lists)


def eighth(name: str) -> int:
    return zlib.crc32(name.encode()) % 8


PARTS = [0, *(pytest.param(i, marks=pytest.mark.once) for i in range(1, 8))]


@pytest.mark.parametrize("part", PARTS)
def test_spellings_hold_their_own_equations(part: int) -> None:
    found = {}
    for s in SPELLINGS:
        if eighth(s.name) == part:
            reference = {s.op: "reference"}
            fast = rewriter.optimize(s.fn, implementation=reference, assume=s.assume)
            found[s.name] = outside(s.fn, fast, s.args())
    assert not {name: eqns for name, eqns in found.items() if eqns}


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_hold_their_own_equations(kind: str) -> None:
    found = {}
    for seed in range(12):
        p = program(seed, kind)
        fast = rewriter.optimize(p.function, implementation=passes.KERNELS)
        found[seed] = outside(p.function, fast, values.arguments(p))
    assert not {seed: eqns for seed, eqns in found.items() if eqns}


# ----------------------------------------------------- what is outside is named
def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


OTHERWISE = {
    "an exponential": lambda q, k, v, bias: (q, k, v, jnp.log(jnp.exp(bias))),
    "a rounding": lambda q, k, v, bias: (q, k, v, (bias * 1).astype(jnp.bfloat16)),
    "a limit": lambda q, k, v, bias: (q, k, v, jnp.maximum(bias, -1e9)),
    "a comparison": lambda q, k, v, bias: (q, k, v, jnp.where(bias > 0, bias, 0.0)),
    "a quotient": lambda q, k, v, bias: (q / 3.0, k, v, bias),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_an_equation_that_is_not_in_the_list_is_named(what: str) -> None:
    """Operands of the rewritten program are computed in another way here."""
    draw = np.random.default_rng(0)
    args = [*draw.standard_normal((3, 1, 12, 2, 4), np.float32)]
    args.append(draw.standard_normal((1, 2, 12, 12), np.float32))
    fast = rewriter.optimize(attention, implementation=passes.KERNELS)
    assert not outside(attention, fast, args)
    assert outside(attention, lambda *given: fast(*OTHERWISE[what](*given)), args)
