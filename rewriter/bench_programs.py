"""An implementation of an op in, a compiled and checked program of one mode out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import oracle, site
from rewriter.kernel import Kernel
from rewriter.op import Op

XLA = "xla"
"""The op's reference, compiled by XLA."""

Args = tuple[Any, ...]
"""Operands by name; with gradients the result's cotangent as well."""


@dataclass(frozen=True)
class Candidate:
    """One implementation that is to be measured.

    Attributes:
        name: Its name.
        run: A function of the operands by name, and of the cotangent but for
            ``forward``; it is compiled with `jax.jit`.
    """

    name: str
    run: Callable[..., Any]


def by_reference(
    op: Op,
    params: Mapping[str, Any],
    mode: str,
    operands: Mapping[str, Any],
    usual: bool = False,
) -> Callable[..., Any]:
    """Returns the op's plain form for a mode.

    Args:
        op: The op.
        params: Its parameters.
        mode: What to return: the result, the gradients by name, or both.
        operands: Shapes and dtypes; where the reference has no derivative, the
            op's general form is used.
        usual: The op as programs usually write it, and not its reference.
    """
    form = op.usual if usual and op.usual else op.reference
    plain = functools.partial(called, form, params)
    if mode == "forward" or op.general is None:
        return differentiated(plain, mode)
    run = differentiated(plain, mode)
    try:
        jax.eval_shape(run, operands, jax.eval_shape(plain, operands))
    except Exception:  # what JAX says of a derivative it lacks has many kinds
        return differentiated(functools.partial(called, op.general, params), mode)
    return run


def called(
    function: Callable[..., Any], params: Mapping[str, Any], operands: Mapping[str, Any]
) -> Any:
    """Returns a function's result of operands and parameters by name."""
    return function(**operands, **params)


def differentiated(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Returns a function of operands by name in the form that a mode needs.

    Args:
        function: Gives the result.
        mode: What to return: the result, the gradients by name, or both. For
            gradients the cotangent is a second argument.
    """
    if mode == "forward":
        return function

    def run(operands: Mapping[str, Any], cotangent: Any) -> Any:
        out, gradients = _vjp(function, operands, cotangent, _floats(operands))
        return gradients if mode == "vjp" else (out, gradients)

    return run


def _vjp(
    function: Callable[..., Any],
    operands: Mapping[str, Any],
    cotangent: Any,
    names: Sequence[str],
) -> tuple[Any, dict[str, Any]]:
    chosen = {n: operands[n] for n in names}
    out, back = jax.vjp(lambda some: function({**operands, **some}), chosen)
    return out, back(cotangent)[0]


def _floats(operands: Mapping[str, Any]) -> list[str]:
    return [n for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)]


def by_kernel(
    kernel: Kernel, op: Op, params: Mapping[str, Any], mode: str
) -> Callable[..., Any]:
    """Returns a kernel for a mode, as it stands in a rewritten program."""
    kernels = (("default", kernel),)
    return differentiated(lambda given: site.bind(op, given, params, kernels), mode)


# ------------------------------------------------------------------ checking
@dataclass(frozen=True)
class Compiled:
    """A candidate that compiled: its program, or what went wrong with it.

    Attributes:
        name: The candidate's name.
        program: The compiled program; None if there is none.
        seconds: How long compiling took.
        error: Its largest relative error so far.
        reason: Why it is not to be timed, or ``""``.
        note: What else to know.
    """

    name: str
    program: Any = None
    seconds: float = 0.0
    error: float | None = None
    reason: str = ""
    note: str = ""


def compile_one(candidate: Candidate, args: Args, wanted: Any) -> Compiled:
    """Returns the compiled program, or why there is none; never raises.

    Args:
        candidate: What to compile.
        args: One set of inputs.
        wanted: Shapes and dtypes that it has to return.
    """
    start = time.perf_counter()
    try:
        jitted = jax.jit(candidate.run)
        got = jax.eval_shape(jitted, *args)
        if problem := _mismatch(got, wanted):
            return Compiled(candidate.name, reason=problem)
        program = jitted.lower(*args).compile()
    except Exception as problem:
        return Compiled(candidate.name, reason=said(problem))
    return Compiled(candidate.name, program, time.perf_counter() - start)


def _mismatch(got: Any, wanted: Any) -> str:
    """What is wrong with the shapes and dtypes of results, or ``""``."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return f"returned {jax.tree.structure(got)}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"returned {_array(a)}, expected {_array(b)}"
    return ""


def _array(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


@jax.jit
def _relative_error(got: jax.Array, wanted: jax.Array) -> jax.Array:
    """The norm of the difference over the norm; infinite if other entries are NaN."""
    wide = jnp.promote_types(got.dtype, jnp.float32)
    got, wanted = got.astype(wide), wanted.astype(wide)
    fine = jnp.isfinite(wanted)
    gap = jnp.linalg.norm(jnp.where(fine, got - wanted, 0).ravel())
    scale = jnp.linalg.norm(jnp.where(fine, wanted, 0).ravel())
    same = jnp.all(jnp.isfinite(got) == fine)
    return jnp.where(same, gap / jnp.where(scale > 0, scale, 1), jnp.inf)


def worst(got: Any, wanted: Any) -> tuple[float, float, str]:
    """Returns the relative error that exceeds what is allowed the most.

    Args:
        got: Results, in any structure.
        wanted: What they should be.

    Returns:
        (error, allowed error of its dtype, where it is).
    """
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(leaves, jax.tree.leaves(wanted), strict=True):
        names = [str(p.key) for p in path if hasattr(p, "key")]
        where = f"the gradient of {names[-1]}" if names else "the result"
        allowed = oracle.allowed(a.dtype)
        found.append((float(_relative_error(a, b)), allowed, where))
    return max(found, key=lambda f: f[0] / f[1] if f[1] else f[0])


def truth_of(reference: Callable[..., Any], args: Args) -> Compiled:
    """Returns the reference at full precision, compiled.

    Args:
        reference: As `by_reference` gives it.
        args: One set of inputs.
    """
    one = Candidate("the reference", reference)
    with jax.default_matmul_precision("highest"):
        return compile_one(one, args, jax.eval_shape(reference, *args))


def checked(
    candidates: Sequence[Compiled], truth: Compiled, inputs: Sequence[Args]
) -> Sequence[Compiled]:
    """Returns every candidate with its largest error; never raises.

    An error may be what its dtype's rounding explains, or twice that of the program
    as written. Where the reference does not run, such as for want of memory, the
    others are compared with the first that does.

    Args:
        candidates: Compiled programs, the program as written first.
        truth: The reference at full precision.
        inputs: The sets of inputs that will be timed.
    """
    for args in inputs:
        wanted, source, problem = _wanted(candidates, truth, args)
        if source is None:
            return [replace(c, reason=c.reason or problem) for c in candidates]
        done: list[Compiled] = []
        for c in candidates:
            written = next((d.error for d in done if d.name == XLA), None)
            done.append(_check_one(c, args, wanted, source, problem, written or 0.0))
        candidates = done
        del wanted
    return candidates


def _wanted(
    candidates: Sequence[Compiled], truth: Compiled, args: Args
) -> tuple[Any, str | None, str]:
    """What the reference gives, else the first candidate that runs; and its name."""
    problem = truth.reason
    for one in (truth, *candidates):
        if one.program is None or one.reason:
            continue
        try:
            return jax.block_until_ready(one.program(*args)), one.name, problem
        except Exception as failed:
            problem = problem or said(failed)
    return None, None, problem


def _check_one(
    c: Compiled, args: Args, wanted: Any, source: str, problem: str, written: float
) -> Compiled:
    if c.program is None or c.reason:
        return c
    if problem:
        note = f"the reference did not run ({problem})"
        note += ": not checked" if c.name == source else f": compared with {source}"
        c = replace(c, note=note)
        if c.name == source:
            return c
    try:
        error, allowed, where = worst(c.program(*args), wanted)
    except Exception as failed:
        return replace(c, reason=said(failed))
    allowed = max(allowed, 2 * written)
    if error > allowed and c.name != XLA:  # which is the program as written
        return replace(c, error=error, reason=wrong(error, allowed, where))
    return replace(c, error=max(error, c.error or 0.0))


def wrong(error: float, allowed: float, where: str) -> str:
    """Returns why a result is not timed, such as ``"wrong: error 3e-01 in ..."``."""
    return f"wrong: error {error:.0e} in {where}, allowed {allowed:.0e}"


def said(problem: Exception) -> str:
    """Returns an exception's kind and the first line of its text."""
    lines = [line for line in str(problem).splitlines() if line.strip()]
    text = lines[0][:160] if lines else ""
    return f"{type(problem).__name__}: {text}"
