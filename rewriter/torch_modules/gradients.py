"""Gradients of calls, as PyTorch's autograd records them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxprs_in_params

from rewriter import _jax
from rewriter.torch_modules.arrays import array_of, tensor_of
from rewriter.torch_modules.program import Returned, State


@jax.tree_util.register_static
class Kinds(tuple[bool, ...]):
    """Which results of a call are floats."""


class Output(NamedTuple):
    """The results of a call, and the function that takes cotangents back through it.

    Attributes:
        floats: Results that have gradients.
        pull: The function from their cotangents to those of parameters and arguments.
        others: Other results.
        kinds: Which of all results are floats.
        returned: What surrounds the results.
        changed: The buffers that the call changed.
    """

    floats: list[jax.Array]
    pull: Any
    others: list[jax.Array]
    kinds: Kinds
    returned: Returned
    changed: dict[str, Any]


def with_vjp(fast: Any) -> Any:
    """Returns the function of a call's arguments that gives a `Output`.

    Its first argument says of which arrays gradients are asked for.

    Args:
        fast: A function as of `function_of`.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(
        which: tuple[bool, ...], call: Any, state: State, key: Any, arrays: list[Any]
    ) -> Output:
        def floats_of(params: Any, given: list[Any]) -> Any:
            rest, pairs = iter(given), zip(which, arrays, strict=True)
            inputs = [next(rest) if asked else array for asked, array in pairs]
            held = State(params, state.buffers)
            found, returned, changed = fast(call, held, key, inputs)
            kinds = Kinds(jnp.issubdtype(x.dtype, jnp.inexact) for x in found)
            floats = [x for x, kind in zip(found, kinds, strict=True) if kind]
            others = [x for x, kind in zip(found, kinds, strict=True) if not kind]
            return floats, (others, kinds, returned, changed)

        given = [a for asked, a in zip(which, arrays, strict=True) if asked]
        floats, pull, rest = jax.vjp(floats_of, state.params, given, has_aux=True)
        return Output(floats, pull, *rest)

    return run


def recorded(
    made: Output,
    names: list[str],
    read: Sequence[int],
    inputs: Sequence[torch.Tensor],
) -> Any:
    """Returns a call's floats as tensors that autograd goes back through.

    Args:
        made: The call.
        names: Names of parameters, in the order of `inputs`.
        read: Of each float, which inputs it depends on, as bits.
        inputs: Parameters and arguments of which gradients are asked for.
    """
    return _Recorded.apply(made, names, read, *inputs)


@jax.jit
def _pulled(pull: Any, cotangents: list[Any]) -> Any:
    """Cotangents of parameters by name, and of arguments."""
    return pull(cotangents)


class _Recorded(torch.autograd.Function):
    """The floats that a call gives.

    As in PyTorch, an input that nothing with a gradient depends on has the gradient
    None, so that optimizers leave it alone.
    """

    @staticmethod
    def forward(ctx: Any, made: Output, names: Any, read: Any, *inputs: Any) -> Any:
        """Returns the results as tensors."""
        ctx.set_materialize_grads(False)
        ctx.pull, ctx.names, ctx.read = made.pull, names, read
        ctx.types = [(x.shape, x.dtype) for x in made.floats]
        return tuple(map(tensor_of, made.floats))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Returns gradients of parameters and arguments."""
        given, read = [], 0
        for c, (shape, dtype), bits in zip(
            cotangents, ctx.types, ctx.read, strict=True
        ):
            read |= 0 if c is None else bits
            zeros = jnp.zeros(shape, dtype)
            given.append(zeros if c is None else jnp.asarray(array_of(c), dtype))
        params, arguments = _pulled(ctx.pull, given)
        arrays = [*(params[name] for name in ctx.names), *arguments]  # JAX sorts names
        found = [tensor_of(x) if read >> k & 1 else None for k, x in enumerate(arrays)]
        return None, None, None, *found


class Reads:
    """Which inputs the results of calls depend on; each kind is looked at once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[int]] = {}

    def __call__(
        self, fast: Any, kinds: Kinds, which: Any, call: Any, state: State, *rest: Any
    ) -> list[int]:
        """Returns, for each float, the inputs it depends on as bits.

        Bits are in order: parameters in the order of the state, then the arguments of
        which gradients are asked for.
        """
        key, arrays = rest
        types = tuple((a.shape, str(a.dtype)) for a in arrays)
        names = (*state.params,)
        asked = which, call, names, types
        if asked not in self._known:
            program = fast.jaxpr(call, state, key, arrays).jaxpr
            bits = {name: 1 << k for k, name in enumerate(names)}
            given, place = (
                [bits[name] for name in sorted(names)],
                iter(range(len(types))),
            )
            given += [0] * (len(state.buffers) + 1)
            for a in which:
                given.append(1 << (len(names) + next(place)) if a else 0)
            found = _reached(program, given)
            results = zip(found, kinds, strict=False)  # changed buffers follow them
            self._known[asked] = [b for b, kind in results if kind]
        return self._known[asked]


def _reached(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """The inputs, as bits, that each result of a program depends on.

    Integers carry no gradient. An equation whose insides are not known counts as one in
    which each result depends on each operand.
    """
    bits = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return 0 if _jax.is_literal(atom) else bits.get(atom, 0)

    for eqn in jaxpr.eqns:
        given = [of(a) for a in eqn.invars]
        bodies = [getattr(b, "jaxpr", b) for b in jaxprs_in_params(eqn.params)]
        if len(bodies) == 1 and _alike(bodies[0], eqn):
            found = _reached(bodies[0], given)
        else:
            every = functools.reduce(int.__or__, given, 0)
            found = [every] * len(eqn.outvars)
        for var, b in zip(eqn.outvars, found, strict=True):
            carries = jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)
            bits[var] = b if carries else 0
    return [of(a) for a in jaxpr.outvars]


def _alike(body: Any, eqn: Any) -> bool:
    """Whether an equation is a call of its body, and not a loop of it."""
    sizes = len(body.invars) == len(eqn.invars), len(body.outvars) == len(eqn.outvars)
    return all(sizes) and eqn.primitive.name not in ("scan", "while", "cond")
