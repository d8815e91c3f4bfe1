"""Runs a program in float64, and states the error that is allowed.

The program is replayed equation by equation: every float becomes float64,
casts between floats do nothing, calls and loops are entered. A primitive that
takes no float64 (or reads the bits of a float) runs in its own types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params

from rewriter import _jax

ALLOWED = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative error (Frobenius norm) allowed by dtype: about a hundred roundings in
float32, four in bfloat16, which is what one layer of a transformer shows."""

OWN_TYPES = (
    "bitcast_convert_type", "nextafter", "pure_callback", "io_callback",
    "debug_callback",
)  # fmt: skip
"""Primitives that read the bits of a float, or a callback's declared types."""


def allowed(dtype: Any) -> float:
    """Returns the relative error allowed in results of a dtype.

    Example:
        >>> allowed("float32")
        2e-05
    """
    return ALLOWED.get(np.dtype(dtype).name, 0.0)


def error(got: Any, want: Any) -> float:
    """Returns the relative error of one array.

    For floats: the norm of the difference over the norm of ``want``, over the
    entries where ``want`` is finite; infinite if ``got`` is not. For other
    dtypes: the share of entries that differ.
    """
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape:
        return float("inf")
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return float(np.mean(a != b)) if a.size else 0.0
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    fine = np.isfinite(b)
    if not np.all(np.isfinite(a[fine])):
        return float("inf")
    scale = float(np.linalg.norm(b[fine]))
    gap = float(np.linalg.norm((a - b)[fine]))
    return gap / scale if scale else gap


def in_float64(closed: ClosedJaxpr, leaves: Sequence[Any]) -> tuple[list[Any], str]:
    """Runs a program in float64.

    Args:
        closed: The program, in any types.
        leaves: Its inputs.

    Returns:
        Its results (NumPy arrays, floats as float64) and a note on what could
        not be run in float64, or ``""``.
    """
    return replay_of(closed)(leaves)


def replay_of(
    closed: ClosedJaxpr,
) -> Callable[[Sequence[Any]], tuple[list[Any], str]]:
    """Returns a function that runs a program in float64, compiled at most once.

    Args:
        closed: The program, in any types.

    Returns:
        As `in_float64`, a function of the inputs.
    """
    notes: dict[str, None] = {}
    run = jax.jit(lambda xs: _replay(closed, [_wide(x) for x in xs], notes))

    def replay(leaves: Sequence[Any]) -> tuple[list[Any], str]:
        try:
            with jax.enable_x64(True):
                out = [_host(x) for x in run(list(leaves))]
            names = ", ".join(notes)
            return out, f"{names} ran in its own types" if names else ""
        except Exception as problem:
            with jax.default_matmul_precision("highest"):
                out = [_host(x) for x in jaxpr_as_fun(closed)(*leaves)]
            kind = type(problem).__name__
            return out, f"compared with a float32 run at full precision ({kind})"

    return replay


def _host(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _wide(x: Any) -> Any:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return x if _is_key(x) else jnp.asarray(x).astype(_wide_dtype(x.dtype))


def _wide_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype("complex128")
    return np.dtype("float64") if jnp.issubdtype(dtype, jnp.floating) else dtype


def _narrow(x: Any, aval: Any) -> Any:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or x.dtype == dtype:
        return x
    return x.astype(dtype)


# ------------------------------------------------------------------ replay
def _replay(
    closed: ClosedJaxpr, args: Sequence[Any], notes: dict[str, None]
) -> list[Any]:
    return _run(closed.jaxpr, [_wide(c) for c in closed.consts], args, notes)


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], notes: dict[str, None]
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=False))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        if not _jax.is_literal(atom):
            return env[atom]
        return _wide(np.asarray(atom.val, atom.aval.dtype))

    for eqn in jaxpr.eqns:
        results = _step(eqn, [read(x) for x in eqn.invars], notes)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _step(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    name = eqn.primitive.name
    if name in RULES:
        return RULES[name](eqn, args, notes)
    if name in _jax.CALLS | _jax.REMAT | _jax.CUSTOM:
        return _inside(_jax.call_body(eqn), args, notes)
    if name in OWN_TYPES:
        return _own_types(eqn, args)
    if _holds_program(eqn):
        notes[name] = None
        return _own_types(eqn, args)
    try:
        return _bind(eqn, args, _wide_params(eqn.params, notes))
    except Exception:
        notes[name] = None
        return _own_types(eqn, args)


def _holds_program(eqn: JaxprEqn) -> bool:
    """Whether a parameter is a program, whose types could not be changed."""
    others = {k: v for k, v in eqn.params.items() if k != "update_jaxpr"}
    return bool(list(jaxprs_in_params(others)))


def _bind(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _own_types(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    narrow = [_narrow(x, v.aval) for x, v in zip(args, eqn.invars, strict=True)]
    return [_wide(x) for x in _bind(eqn, narrow, eqn.params)]


def _wide_params(params: Mapping[str, Any], notes: dict[str, None]) -> dict[str, Any]:
    changed = {
        k: _wide_dtype(params[k])
        for k in ("dtype", "preferred_element_type", "new_dtype")
        if params.get(k) is not None
    }
    if "precision" in params:
        changed["precision"] = jax.lax.Precision.HIGHEST
    if "accuracy" in params:
        changed["accuracy"] = None
    if params.get("update_jaxpr") is not None:  # the combiner of a scatter
        update = params["update_jaxpr"]
        wide = [
            jax.ShapeDtypeStruct(v.aval.shape, _wide_dtype(v.aval.dtype))
            for v in update.invars
        ]
        run = lambda *xs: _run(update, params.get("update_consts", ()), xs, notes)
        changed["update_jaxpr"] = jax.make_jaxpr(run)(*wide).jaxpr
    return {**params, **changed}


def _inside(body: Any, args: Sequence[Any], notes: dict[str, None]) -> list[Any]:
    consts = _jax.consts_of(body)
    jaxpr = body.jaxpr if hasattr(body, "jaxpr") else body
    return _run(jaxpr, [_wide(c) for c in consts], args, notes)


# ------------------------------------------------------------------- rules
def _cast(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    del notes
    dtype = _wide_dtype(eqn.params["new_dtype"])
    return [args[0] if args[0].dtype == dtype else args[0].astype(dtype)]


def _same(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    del eqn, notes
    return args


def _scan(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    body, n_consts, n_carry, length = _jax.scan_parts(eqn)
    consts, carry = args[:n_consts], args[n_consts : n_consts + n_carry]

    def step(carry: Any, xs: Any) -> Any:
        out = _inside(body, [*consts, *carry, *xs], notes)
        return out[:n_carry], out[n_carry:]

    carry, ys = jax.lax.scan(
        step, carry, args[n_consts + n_carry :], length, eqn.params["reverse"]
    )
    return [*carry, *ys]


def _while(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    body, n_test, n_body = _jax.while_parts(eqn)
    test = eqn.params["cond_jaxpr"]
    first, second = args[:n_test], args[n_test : n_test + n_body]
    return list(
        jax.lax.while_loop(
            lambda c: _inside(test, [*first, *c], notes)[0],
            lambda c: tuple(_inside(body, [*second, *c], notes)),
            tuple(args[n_test + n_body :]),
        )
    )


def _cond(eqn: JaxprEqn, args: list[Any], notes: dict[str, None]) -> list[Any]:
    branches: list[Callable[..., Any]] = [
        lambda *xs, b=b: _inside(b, xs, notes) for b in eqn.params["branches"]
    ]
    return list(jax.lax.switch(args[0], branches, *args[1:]))


RULES: dict[str, Callable[[JaxprEqn, list[Any], dict[str, None]], list[Any]]] = {
    "convert_element_type": _cast,
    "reduce_precision": _same,
    "optimization_barrier": _same,
    "sharding_constraint": _same,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
