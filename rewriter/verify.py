"""Original and rewritten against a float64 run, on the user's own arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import oracle, trace
from rewriter.config import in_step
from rewriter.errors import VerificationFailed
from rewriter.optimize import optimize
from rewriter.report import Report


@dataclass(frozen=True)
class Row:
    """One result: its errors against float64, and what is allowed.

    Attributes:
        name: Where it is in the result, such as ``"grad[0]['wq']"``.
        dtype: The result's dtype.
        original: Relative error of the program as written.
        rewritten: Relative error of the rewritten program.
        allowed: The larger of the dtype's tolerance and twice ``original``.
        ok: Whether the rewritten error is allowed, and the same entries are
            NaN or infinite as before.
    """

    name: str
    dtype: str
    original: float
    rewritten: float
    allowed: float
    ok: bool


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        name: The function's name.
        rows: One per result.
        notes: What else to know, one sentence each.
        report: What was rewritten.
    """

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    report: Report

    @property
    def ok(self) -> bool:
        """Whether every result is within what is allowed."""
        return all(r.ok for r in self.rows)

    def check(self) -> Verification:
        """Returns itself.

        Raises:
            VerificationFailed: If a result is off.
        """
        if self.ok:
            return self
        bad = max((r for r in self.rows if not r.ok), key=lambda r: r.rewritten)
        raise VerificationFailed(
            f"{self.name}: {bad.name}: error {bad.rewritten:.1e}",
            wanted=f"at most {bad.allowed:.1e} ({bad.dtype})",
            next_step='Try numerics="strict", and print(verify(...)) for the rest',
        )

    def json(self) -> str:
        """Returns the table as JSON."""
        rows = [asdict(r) for r in self.rows]
        return json.dumps({"function": self.name, "ok": self.ok, "rows": rows,
                           "notes": self.notes}, indent=1)  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(str(self))}</pre>"


def verify(
    fn: Callable[..., Any], /, *, grad: bool = False, **options: Any
) -> Callable[..., Verification]:
    """Returns a function that compares ``fn`` rewritten with ``fn`` as written.

    Both run on the given arguments, and so does a float64 replay of the
    original. The rewritten program may be as wrong as the original, or as its
    dtype's rounding explains.

    Args:
        fn: Any callable that ``optimize`` takes.
        grad: Also compare gradients, by every float argument, of the result if
            it is a scalar, else of a fixed random weighting of it.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments to a ``Verification``.

    Raises:
        TraceError: If ``fn`` cannot be traced; JAX's error is chained.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> rewriter.verify(lambda x: x + 1, grad=True)(jnp.ones(3)).ok
        True
    """
    fn, lifted = trace.original_of(fn)
    options = {**lifted, **options}
    theirs = {k: v for k, v in options.items() if k in trace.JIT_OPTIONS}
    ours = {k: v for k, v in options.items() if k not in theirs}
    static = trace.jit_options(fn, theirs)

    @in_step
    def run(*args: Any, **kwargs: Any) -> Verification:
        plain = trace.jitted(fn, static)
        leaves, call = trace.split(plain, args, kwargs)
        report = optimize(call, **ours).report(*leaves)
        names = trace.leaf_names(plain, args, kwargs)
        pair = [jax.jit(call), optimize(call, **ours)]
        if grad:
            pair = [jax.jit(with_gradient(f, leaves, names)) for f in pair]
        return _compare(trace.name_of(fn), *pair, leaves, report)

    return run


def with_gradient(
    fn: Callable[..., Any], leaves: list[Any], names: list[str] | None = None
) -> Callable[..., Any]:
    """Returns a function of the leaves to ``fn``'s result and its gradient.

    Args:
        fn: A function of the leaves.
        leaves: Example leaves; the floating-point ones are differentiated.
        names: What to call the gradients; numbers by default.
    """
    moving = [i for i, x in enumerate(leaves) if _is_float(x)]

    def both(*leaves: Any) -> dict[str, Any]:
        def loss(chosen: list[Any]) -> Any:
            full = list(leaves)
            for i, x in zip(moving, chosen, strict=True):
                full[i] = x
            out = fn(*full)
            return _scalar(out), out

        chosen = [leaves[i] for i in moving]
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(chosen)
        called = [names[i] if names else str(i) for i in moving]
        return {"out": out, "grad": dict(zip(called, grads, strict=True))}

    return trace.renamed(both, fn)


def _scalar(out: Any) -> Any:
    """The result if it is a scalar, else a fixed random weighting of it."""
    floats = [x for x in jax.tree.leaves(out) if _is_float(x)]
    if len(floats) == 1 and jnp.shape(floats[0]) == ():
        return floats[0].astype(jnp.promote_types(floats[0].dtype, jnp.float32))
    random = np.random.default_rng(0)
    total = jnp.zeros(())
    for x in floats:
        weight = random.standard_normal(jnp.shape(x)).astype(np.float32)
        total += jnp.sum(x * weight, dtype=jnp.float32) / max(1, np.size(weight)) ** 0.5
    return total


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _compare(
    name: str, plain: Any, fast: Any, leaves: list[Any], report: Report
) -> Verification:
    try:
        original = plain(*leaves)
    except Exception as error:
        raise trace.trace_error(plain, error) from error
    rewritten = fast(*leaves)
    exact, note = oracle.in_float64(trace.trace(plain, leaves).outer, leaves)
    paths = [_path(p) for p, _ in jax.tree_util.tree_leaves_with_path(original)]
    pairs = zip(
        paths,
        jax.tree.leaves(original),
        jax.tree.leaves(rewritten),
        exact,
        strict=True,
    )
    rows = tuple(_row(p, o, r, e) for p, o, r, e in pairs)
    return Verification(name, rows, tuple(_notes(report, note)), report)


def _path(path: Any) -> str:
    text = jax.tree_util.keystr(path)
    if text.startswith("['grad']"):
        return f"grad.{path[1].key}"
    return text.removeprefix("['out']") or "out"


def _row(name: str, original: Any, rewritten: Any, exact: Any) -> Row:
    if jnp.issubdtype(original.dtype, jax.dtypes.extended):
        original, rewritten = map(jax.random.key_data, (original, rewritten))
    before, after = oracle.error(original, exact), oracle.error(rewritten, exact)
    limit = oracle.allowed(original.dtype) if _is_float(original) else 0.0
    limit = max(limit, 2 * before if before != float("inf") else 0.0)
    same = _finite_alike(original, rewritten)
    fine = same and (after <= limit or oracle.error(rewritten, original) == 0.0)
    return Row(name, str(original.dtype), before, after, limit, fine)


def _finite_alike(a: Any, b: Any) -> bool:
    if not _is_float(a):
        return True
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    return bool(
        np.array_equal(np.isnan(a), np.isnan(b))
        and np.array_equal(np.isposinf(a), np.isposinf(b))
        and np.array_equal(np.isneginf(a), np.isneginf(b))
    )


MASKED = {"mean": "the mean of v", "nan": "NaN", "zero": "zero"}


def _notes(report: Report, note: str) -> list[str]:
    notes = [note] if note else []
    for site in report.sites:
        rows = MASKED.get(str(dict(site.params).get("empty_rows", "")))
        if rows and site.replaced:
            notes.append(
                f"fully masked rows: in {site.where or site.op} both give {rows}"
            )
    if not any(s.replaced for s in report.sites):
        notes.append("nothing was rewritten: both programs are the same")
    return list(dict.fromkeys(notes))


SHOWN = 8  # rows printed; failing ones are always shown


def _rank(row: Row) -> tuple[bool, bool, float]:
    """Failures first, then results, then gradients with the largest error first."""
    share = row.rewritten / row.allowed if row.allowed else row.rewritten
    return row.ok, row.name.startswith("grad."), -share


def _lines(v: Verification) -> list[str]:
    dtypes = ", ".join(dict.fromkeys(r.dtype for r in v.rows))
    lines = [f"rewriter.verify({v.name})   {dtypes} against f64, your arguments"]
    ranked = sorted(v.rows, key=_rank)
    shown = [r for i, r in enumerate(ranked) if i < SHOWN or not r.ok]
    width = max((len(r.name) for r in shown), default=0)
    lines += [
        f" {r.name:<{width}}   original {r.original:.1e}   "
        f"rewritten {r.rewritten:.1e}   allowed {r.allowed:.1e}   "
        f"{'ok' if r.ok else 'OFF'}"
        for r in shown
    ]
    if len(shown) < len(v.rows):
        lines.append(f" ({len(v.rows) - len(shown)} more ok)")
    return lines + [f" {n}" for n in v.notes]
