"""Every transformation of a function of arrays, as a table, and its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import slow

Function = Callable[..., jax.Array]
Operands = list[jax.Array]
Transform = Callable[[Function, Operands], Any]

TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3}
"""Allowed error, relative to the largest value; in bfloat16 beside twice the
reference's own error."""


def _loss(f: Function) -> Function:
    weigh = lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)

    def weighed(*args: jax.Array) -> jax.Array:
        y = f(*args)
        return (y * (1 + weigh(y))).sum()

    return weighed


def _floats(args: Operands) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(args) if _is_float(a))


def _is_float(a: Any) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


def _grad(f: Function, args: Operands) -> Function:
    return jax.grad(_loss(f), _floats(args))


def _tangents(args: Operands) -> list[Any]:
    def one(i: int, a: jax.Array) -> Any:
        if not _is_float(a):
            return np.zeros(a.shape, jax.dtypes.float0)
        return jnp.sin(jnp.arange(a.size, dtype=a.dtype) + i).reshape(a.shape)

    return [one(i, a) for i, a in enumerate(args)]


def _stacked(args: Operands, axis: int = 0) -> Operands:
    move = [0.1, -0.2, 0.3]
    moved = [[a + m if _is_float(a) else a for m in move] for a in args]
    return [
        jnp.stack(parts, min(axis, a.ndim)).astype(a.dtype)
        for parts, a in zip(moved, args, strict=True)
    ]


def _jvp(f: Function, args: Operands) -> Any:
    return jax.jvp(f, args, _tangents(args))


def _jvp_of_last_float(f: Function, args: Operands) -> Any:
    i = _floats(args)[-1]
    only = lambda a: f(*args[:i], a, *args[i + 1 :])
    return jax.jvp(only, (args[i],), (_tangents(args)[i],))


def _linearize(f: Function, args: Operands) -> Any:
    out, along = jax.linearize(f, *args)
    return out, along(*_tangents(args))


def _hessian(f: Function, args: Operands) -> Any:
    small = lambda a: f(a, *args[1:])
    return jax.hessian(_loss(small))(args[0])


def _grad_of_grad(f: Function, args: Operands) -> Any:
    at = _floats(args)

    def squares(*floats: jax.Array) -> jax.Array:
        full = list(args)
        for i, value in zip(at, floats, strict=True):
            full[i] = value
        return sum((g.astype(jnp.float32) ** 2).sum() for g in _grad(f, args)(*full))

    return jax.grad(squares, tuple(range(len(at))))(*(args[i] for i in at))


def _vmap(f: Function, args: Operands) -> Any:
    return jax.vmap(f)(*_stacked(args))


def _vmap_last(f: Function, args: Operands) -> Any:
    axes = [a.ndim for a in args]
    given = [_stacked([a], a.ndim)[0] for a in args]
    return jax.vmap(f, axes, out_axes=1)(*given)


def _vmap_one(f: Function, args: Operands) -> Any:
    def only(i: int) -> Any:
        axes = [0 if j == i else None for j in range(len(args))]
        given = [_stacked([a])[0] if j == i else a for j, a in enumerate(args)]
        return jax.vmap(f, axes)(*given)

    return [only(i) for i in range(len(args))]


def _vmap_of_grad(f: Function, args: Operands) -> Any:
    return jax.vmap(_grad(f, args))(*_stacked(args))


def _vmap_of_grad_first(f: Function, args: Operands) -> Any:
    axes = [0] + [None] * (len(args) - 1)
    return jax.vmap(_grad(f, args), axes)(_stacked(args[:1])[0], *args[1:])


def _grad_of_vmap(f: Function, args: Operands) -> Any:
    return _grad(jax.vmap(f), args)(*_stacked(args))


def _grad_of_vmap_first(f: Function, args: Operands) -> Any:
    axes = [0] + [None] * (len(args) - 1)
    return _grad(jax.vmap(f, axes), args)(_stacked(args[:1])[0], *args[1:])


def _grad_of_vmap_twice(f: Function, args: Operands) -> Any:
    first = [0] + [None] * (len(args) - 1)
    twice = jax.vmap(jax.vmap(f, first), [0] * len(args))
    given = [_stacked(_stacked(args[:1]))[0], *_stacked(args[1:])]
    return _grad(twice, args)(*given)


def _remat(policy: Any) -> Transform:
    def run(f: Function, args: Operands) -> Any:
        inner = lambda *a: f(jnp.sin(a[0]), *a[1:])
        return _grad(jax.checkpoint(inner, policy=policy), args)(*args)

    return run


def _scan(f: Function, args: Operands) -> Any:
    def step(carry: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = f(carry, *args[1:])
        return (carry + shift * out.sum() / out.size).astype(carry.dtype), out

    return jax.lax.scan(step, args[0], jnp.array([0.1, 0.2, 0.3], args[0].dtype))


def _scanned(wrap: Callable[[Function], Function]) -> Transform:
    def run(f: Function, args: Operands) -> Any:
        return _grad(lambda *a: _scan(wrap(f), list(a))[1], args)(*args)

    return run


def _while(f: Function, args: Operands) -> Any:
    def body(c: tuple[Any, Any]) -> tuple[Any, Any]:
        out = f(c[1], *args[1:])
        return c[0] + 1, (c[1] + out.sum() / out.size).astype(c[1].dtype)

    return jax.lax.while_loop(lambda c: c[0] < 2, body, (0, args[0]))[1]


def _cond(f: Function, args: Operands) -> Any:
    def pick(*a: jax.Array) -> jax.Array:
        return jax.lax.cond(a[0].ravel()[0] > -99, f, lambda *b: 2 * f(*b), *a)

    return pick(*args), _grad(pick, args)(*args)


def _vjp_of_cotangent(f: Function, args: Operands) -> Any:
    out, back = jax.vjp(f, *args)
    some = _floats(args)
    only = lambda ct: [back(ct)[i] for i in some]
    along = jnp.ones_like(out) / 2
    pushed = jax.jvp(only, (out,), (along,))
    return pushed, jax.linear_transpose(only, out)([args[i] for i in some])


_names = jax.checkpoint_policies.save_only_these_names

TRANSFORMS: Mapping[str, Transform] = {
    "eager": lambda f, args: f(*args),
    "jit": lambda f, args: jax.jit(f)(*args),
    "grad": lambda f, args: _grad(f, args)(*args),
    "grad_of_first": lambda f, args: jax.grad(_loss(f))(*args),
    "jit_grad": lambda f, args: jax.jit(_grad(f, args))(*args),
    "jvp": _jvp,
    "jvp_of_last_float": _jvp_of_last_float,
    "jacfwd": lambda f, args: jax.jacfwd(f)(*args),
    "jacrev": lambda f, args: jax.jacrev(f, _floats(args))(*args),
    "linearize": _linearize,
    "hessian": _hessian,
    "grad_of_grad": _grad_of_grad,
    "vjp_of_cotangent": _vjp_of_cotangent,
    "vmap": _vmap,
    "vmap_last_axis": _vmap_last,
    "vmap_one_operand": _vmap_one,
    "vmap_of_grad": _vmap_of_grad,
    "vmap_of_grad_first": _vmap_of_grad_first,
    "grad_of_vmap": _grad_of_vmap,
    "grad_of_vmap_first": _grad_of_vmap_first,
    "grad_of_vmap_twice": _grad_of_vmap_twice,
    "remat": _remat(None),
    "remat_everything": _remat(jax.checkpoint_policies.everything_saveable),
    "remat_dots": _remat(jax.checkpoint_policies.dots_saveable),
    "remat_names": _remat(_names("rewriter.attention", "rewriter.rms_norm")),
    "scan": lambda f, args: _scan(f, args),
    "grad_of_scan": _scanned(lambda f: f),
    "grad_of_scan_of_remat": _scanned(jax.checkpoint),
    "while": _while,
    "cond": _cond,
}  # fmt: skip

LOW_PRECISION = (
    "jit", "grad", "jvp", "vmap", "vmap_of_grad", "grad_of_vmap_first",
    "grad_of_scan_of_remat",
)  # fmt: skip
"""Transforms that are also run in bfloat16."""


OF_EACH_KIND = (
    "eager", "jit_grad", "jvp", "hessian", "grad_of_grad", "vjp_of_cotangent",
    "vmap_last_axis", "vmap_one_operand", "vmap_of_grad", "grad_of_vmap_first",
    "remat", "remat_names", "grad_of_scan_of_remat", "cond",
)  # fmt: skip
"""Transforms that every op goes through by default; through the others, which are
of the same kinds, the op of test_site.py does, and every op where slow tests run."""

EACH = slow.unless(lambda name: name in OF_EACH_KIND, TRANSFORMS)
"""All transforms as parameters of a test of one op."""

EAGER = ("eager", "grad", "jvp", "vmap")
"""Transforms that run equation by equation."""


def check(
    name: str, site: Function, plain: Function, args: Sequence[jax.Array]
) -> None:
    """Asserts that a transformed site is as close to float64 as the reference.

    Args:
        name: A key of `TRANSFORMS`.
        site: The function under test.
        plain: The op's reference on the same arguments.
        args: Arrays of one float dtype, and integer ones.
    """
    dtype = next(str(a.dtype) for a in args if _is_float(a))
    transform = _run(name)
    got = transform(site, list(args))
    same = transform(plain, list(args)) if dtype == "bfloat16" else None
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(a, np.float64)) if _is_float(a) else a for a in args
        ]
        true = _compiled(name)(plain, wide)
    assert jax.tree.structure(got) == jax.tree.structure(true)
    leaves = [jax.tree.leaves(tree) for tree in (got, got if same is None else same)]
    for g, s, t in zip(*leaves, jax.tree.leaves(true), strict=True):
        assert g.shape == t.shape
        assert g.dtype == (s.dtype if same is not None else dtype)
        t = np.asarray(t, np.float64)
        assert np.isfinite(t).all()
        allowed = TOLERANCE[dtype] * (np.abs(t).max() + 1e-3)
        if same is not None:
            allowed += 2 * _distance(s, t)
        assert _distance(g, t) <= allowed, name


def _run(name: str) -> Transform:
    """A transform, compiled as a whole (quicker) unless eager is the point."""
    return TRANSFORMS[name] if name in EAGER else _compiled(name)


def _compiled(name: str) -> Transform:
    return lambda f, args: jax.jit(lambda *a: TRANSFORMS[name](f, list(a)))(*args)


def _distance(a: Any, b: np.ndarray) -> float:
    return float(np.abs(np.asarray(a, np.float64) - b).max())
