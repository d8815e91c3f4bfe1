"""Sizes, literals, tracers and constants."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, hardware_utils
from jax._src.export import shape_poly
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.literals import TypedNdArray


def size_range(size: Any) -> tuple[int, int]:
    """The least and the greatest value of an axis' size, which may be symbolic.

    Without 64-bit numbers JAX computes sizes as int32, which bounds them.
    """
    if isinstance(size, int):
        return size, size
    try:  # jax 0.11.2 has `symbolic_dim_bounds`, jax 0.10.2 only the inner function
        least, most = shape_poly._bounds_decision(size, shape_poly.BoundsPrecision.BEST)
    except Exception:  # it may raise on quotients that it cannot prove defined
        least, most = 0, math.inf
    largest = (1 << (62 if jax.config.jax_enable_x64 else 31)) - 1  # pyright: ignore
    return int(max(least, 0)), int(min(most, largest))


def never_larger(size: Any, other: Any) -> bool:
    """Whether a size is at most another, whatever number a symbolic one becomes."""
    try:
        return bool(size <= other)
    except shape_poly.InconclusiveDimensionOperation:
        return False


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal."""
    return isinstance(atom, core.Literal)


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are the same number, to the bit, of the same type."""
    if a is b or (a.val is b.val and a.aval == b.aval):
        return True
    if a.aval != b.aval:
        return False
    if a.val.__class__ is b.val.__class__ is TypedNdArray:  # most are
        return bool(a.val.val.tobytes() == b.val.val.tobytes())
    if is_opaque(a.val):
        return False
    return np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()


def is_drop(var: Any) -> bool:
    """Whether a variable is the placeholder of an unused result."""
    return isinstance(var, core.DropVar)


def is_tracer(value: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(value, core.Tracer)


def is_tracing() -> bool:
    """Whether JAX is tracing, so that calls are recorded."""
    return not core.trace_state_clean()


def is_staging() -> bool:
    """Whether what is called is written down as a program, and nothing is run."""
    return isinstance(core.trace_ctx.trace, DynamicJaxprTrace)


def tpu_is_attached() -> bool:
    """Whether JAX sees a TPU on this machine's bus; starts no backend."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


@functools.cache
def settings_of_kernels() -> None:
    """Imports what kernels of an attached TPU add to JAX's settings (jax 0.11 on).

    Settings are part of the keys of JAX's caches. One that is added after a program was
    traced has it traced, and compiled, once more at its next call.
    """
    if tpu_is_attached():
        import jax.experimental.pallas.tpu  # noqa: F401


def is_opaque(value: Any) -> bool:
    """Whether a value's numbers cannot be read: it is traced, or a random key."""
    return is_tracer(value) or (
        isinstance(value, jax.Array)
        and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    )


def is_key(aval: Any) -> bool:
    """Whether values of a type are random keys, which have no bytes of their own."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Constants of a jaxpr; an open one of jax 0.10 has none."""
    return getattr(jaxpr, "consts", ()) if jaxpr.constvars else ()


def literals_of(jaxpr: Any) -> dict[Any, Any]:
    """The constants of a jaxpr as literals, which its equations can read anywhere."""
    pairs = zip(jaxpr.constvars, consts_of(jaxpr), strict=True)
    return {var: core.Literal(const, var.aval) for var, const in pairs}


def holds_tracers(jaxpr: Any) -> bool:
    """Whether constants of a jaxpr are tracers of an outer trace."""
    return any(map(is_tracer, consts_of(jaxpr)))


def keeps_precision(eqn: Any) -> bool:
    """Whether a `reduce_precision` leaves all bits of its operand's type."""
    kind = jax.numpy.finfo(eqn.invars[0].aval.dtype)
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits[0] >= kind.nexp and bits[1] >= kind.nmant
