"""A program that is rewritten when JAX lowers it, where its arguments are known.

What arguments are committed to is no part of a trace, so that such a call is one
equation at first. Lowering it rewrites the program for the shardings that the
arguments of the whole computation have. Under any transformation, and in the middle
of another program, those are not known: there it is the program with every site
left to XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from rewriter import _jax
from rewriter.program.placement import Later
from rewriter.program.propagation import Placement, spec_of, split_of
from rewriter.program.trace import Bound

INSIDE = (
    "where its arguments are is not known in the middle of another program: optimize "
    "the outermost function, or give in_shardings"
)


@dataclass(frozen=True, eq=False)
class Deferred:
    """A program that waits for its placement.

    Attributes:
        program: The program as written, with its constants.
        later: What is known of its placement.
        rewritten: Gives the rewritten program for a placement, for the reason why
            there is none, or for one device (None).
    """

    program: ClosedJaxpr
    later: Later
    rewritten: Callable[[Placement | str | None], Bound]

    def run(self, placement: Placement | str | None, args: Sequence[Any]) -> list[Any]:
        """Runs the rewritten program on the constants and the leaves."""
        bound = self.rewritten(placement)
        first = len(self.program.consts)
        consts = {id(c): x for c, x in zip(self.program.consts, args, strict=False)}
        values = [consts.get(id(c), c) for c in bound.consts]
        return jaxpr_as_fun(bound.closed_jaxpr)(*values, *args[first:])


program_p = Primitive("rewriter_program")
# The same where a kernel may be chosen that JAX lowers only for known devices.
program_on_devices_p = Primitive("rewriter_program")


def can_wait(program: ClosedJaxpr) -> bool:
    """Whether a program can: not one with effects, or with values of a trace in it."""
    return not program.effects and not any(_jax.is_tracer(c) for c in program.consts)


def call(deferred: Deferred, leaves: Sequence[Any]) -> list[Any]:
    """Returns the program's results, as those of one equation.

    Only kernels of NVIDIA GPUs need devices. Without such a need the program is also
    lowered for an abstract mesh, which has none.
    """
    on_gpu = jax.default_backend() == "gpu"
    primitive = program_on_devices_p if on_gpu else program_p
    return primitive.bind(*deferred.program.consts, *leaves, deferred=deferred)


def _generic(*args: Any, deferred: Deferred) -> list[Any]:
    return deferred.run(INSIDE, args)


def _written(deferred: Deferred, *args: Any) -> list[Any]:
    """The results of the program as written."""
    return _jax.inlined(_jax.without_constants(deferred.program), args)


def _avals(*avals: Any, deferred: Deferred) -> list[Any]:
    del avals
    return list(deferred.program.out_avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    run = functools.partial(_generic, **params)
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(run, tuple(primals), tuple(tangents))


def _batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    run = functools.partial(_generic, **params)
    outs = jax.vmap(run, in_axes=tuple(dims))(*args)
    return outs, [0] * len(outs)


def _lower(ctx: Any, *args: Any, deferred: Deferred) -> Any:
    first = len(deferred.program.consts)
    placement: Placement | str | None = None
    if _jax.is_partitioned(ctx):  # or arrays were moved from a mesh to one device
        placement = _known(deferred.later, args[first:])

    def run(*given: Any) -> list[Any]:
        return deferred.run(placement, given)

    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _known(later: Later, leaves: Sequence[Any]) -> Placement | str:
    """The placement, if all leaves are arguments of the whole computation."""
    specs: dict[int, PartitionSpec | None] = {}
    for i in later.waiting:
        known, specs[i] = _of_argument(leaves[i])
        if not known:
            return INSIDE
    return later.known(specs)


def _of_argument(value: Any) -> tuple[bool, PartitionSpec | None]:
    """Whether a value is an argument of the whole computation, and where it is."""
    try:
        argument = ir.BlockArgument(value)
    except ValueError:
        return False, None
    function = argument.owner.owner
    attributes = function.attributes
    if "sym_visibility" not in attributes or "arg_attrs" not in attributes:
        return False, None
    if ir.StringAttr(attributes["sym_visibility"]).value != "public":
        return False, None
    own = ir.DictAttr(attributes["arg_attrs"][argument.arg_number])
    if "sdy.sharding" not in own:
        return True, None
    split = split_of(own["sdy.sharding"])
    return split is not None, spec_of(split) if split is not None else None


for _primitive in (program_p, program_on_devices_p):
    _primitive.multiple_results = True
    _primitive.def_impl(_generic)
    _primitive.def_abstract_eval(_avals)
    ad.primitive_jvps[_primitive] = _jvp
    batching.primitive_batchers[_primitive] = _batched
    # In a function of its own it would not see the computation's arguments.
    mlir.register_lowering(_primitive, _lower, cacheable=False)
    _jax.check_as_written(
        _primitive, lambda deferred: functools.partial(_written, deferred)
    )
_jax.lower_with_devices(program_on_devices_p)
