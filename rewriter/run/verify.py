"""Compares original and rewritten program on the user's arguments and on probes.

The reference is a float64 run of the original, in rows where it is near the original in
its own types. Elsewhere the reference is the original itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import _jax
from rewriter.config import in_step, resolve
from rewriter.errors import ConfigError, VerificationFailed, caller
from rewriter.program import trace
from rewriter.program.placement import placed
from rewriter.reports.report import Report
from rewriter.reports.use import op_of
from rewriter.rewrite.replacements import Pair
from rewriter.run.analysis import rewritten_of
from rewriter.run.optimize import optimize, with_patterns
from rewriter.support.dtypes import is_float

if TYPE_CHECKING:
    from rewriter.verification.compare import Comparison


@dataclass(frozen=True)
class Row:
    """One result, or one site: the errors of its worst row, and the allowed error.

    Attributes:
        name: Its place in the result, such as ``"grad[0]['wq']"``, or the site, such as
            ``"attention at model.py:88 (Attention)"``.
        dtype: The result's dtype.
        original: Error of the program as written against float64, relative to the row.
        rewritten: Error of the rewritten program against float64, or against the
            original if that is nearer; infinite if other entries are NaN or infinite
            than before.
        allowed: The error that rounding explains: the tolerance of the coarsest dtype
            in the computation, or the change of the original if its arguments change by
            a rounding.
        ok: Whether every row is within the allowed error, and the same entries are NaN
            or infinite as before, on your arguments and on every probe.
        differs: The difference, and the arguments that show it; ``""`` if there is
            none.
        worst: The index of the entry of that row that is farthest off, on your
            arguments.
    """

    name: str
    dtype: str
    original: float
    rewritten: float
    allowed: float
    ok: bool
    differs: str = ""
    worst: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The outcome of ``verify``.

    Attributes:
        name: The function's name.
        rows: One per result, and one per kind of site.
        notes: Remarks, one sentence each.
        report: The report of the rewritten function.
        probes: The number of probes that both programs ran on.
        silent: Probes on which the program as written gives no number, so that they
            prove nothing.
        draws: How often the numbers of floats were put in other places.
        drawn: Whether arguments were drawn, as some were given by shape alone.
    """

    name: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    report: Report
    probes: int = 0
    silent: tuple[str, ...] = ()
    draws: int = 0
    drawn: bool = False

    @property
    def ok(self) -> bool:
        """Whether every result is within the allowed error."""
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
            next_step=_next(bad.differs)
            + 'Try numerics="strict", and print(verify(...)) for the rest',
        )

    def json(self) -> str:
        """Returns the table as JSON."""
        rows = [asdict(r) for r in self.rows]
        return json.dumps({"function": self.name, "ok": self.ok, "rows": rows,
                           "notes": self.notes, "probes": self.probes,
                           "silent": self.silent}, indent=1)  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(str(self))}</pre>"


def verify(
    fn: Callable[..., Any],
    /,
    *,
    grad: bool = False,
    draws: int = 2,
    **options: Any,
) -> Callable[..., Verification]:
    """Returns a function that compares ``fn`` rewritten with ``fn`` as written.

    Both run on the given arguments, on the same numbers in other places, and on probes
    made from them. Probes hold zeros, equal values, huge, tiny and infinite ones, masks
    of one value, and ends of integer types. The reference is a float64 run of the
    original. Where that is far from what the original gives in its own types, it is the
    original. Each row of each result is compared with it, and so is each kind of site,
    with all equations that lead to it. The rewritten program may be as wrong as the
    original, or as the rounding of its types explains.

    Args:
        fn: Any callable that ``optimize`` takes.
        grad: Also compare gradients, by every float argument, of the result if
            it is a scalar, else of a fixed random weighting of it.
        draws: How often the numbers of your floats are put in other places.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments to a ``Verification``. A
        ``jax.ShapeDtypeStruct`` stands for an array that is drawn.

    Raises:
        TraceError: If ``fn`` cannot be traced; JAX's error is chained.
        ConfigError: For an unknown option or value.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> rewriter.verify(lambda x: x + 1, grad=True)(jnp.ones(3)).ok
        True
    """
    _require_kinds(grad, draws)
    fn, ours, static = trace.options_in_force(fn, options)

    @in_step
    def run(*args: Any, **kwargs: Any) -> Verification:
        from rewriter.verification.probes import with_numbers

        plain = trace.jitted(fn, static)
        leaves, call = trace.split(plain, args, kwargs)
        names = trace.leaf_names(plain, args, kwargs)
        shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        leaves = with_numbers(leaves)
        fast = optimize(call, **{**ours, "verify": "off"})
        report = fast.report(*leaves)
        pair = [jax.jit(call), fast]
        if grad:
            pair = [jax.jit(with_gradient(f, leaves, names)) for f in pair]
        how = (leaves, names, report, _pairs(call, ours, leaves), draws)
        made = _compare(trace.name_of(fn), *pair, *how)
        return replace(made, drawn=shapes)

    return run


def _require_kinds(grad: Any, draws: Any) -> None:
    """Refuses options of `verify` that are not of their kind."""
    if not isinstance(grad, bool):
        wanted = "True or False"
        raise ConfigError(f"grad={grad!r}", wanted=wanted, where=caller())
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 0:
        wanted = "a whole number, 0 or more"
        raise ConfigError(f"draws={draws!r}", wanted=wanted, where=caller())


def _pairs(call: Any, options: dict[str, Any], leaves: list[Any]) -> list[Pair]:
    """Each kind of site as written and replaced, where it can be had on its own."""
    given, patterns = with_patterns(
        {k: v for k, v in options.items() if k != "patterns"}, options.get("patterns")
    )
    config = replace(resolve(given), verify="once", strict=False)
    traced, placement = placed(jax.jit(call), leaves, {}, {})
    values = *leaves, *traced.closed_jaxpr.consts
    if placement is not None or any(map(_jax.is_tracer, values)):
        return []
    rewritten = rewritten_of(traced, config, patterns, None)
    from rewriter.verification.check_sites import sites_of

    return list(sites_of(rewritten.pairs))


def with_gradient(
    fn: Callable[..., Any], leaves: list[Any], names: list[str] | None = None
) -> Callable[..., Any]:
    """Returns a function of the leaves to ``fn``'s result and its gradient.

    Args:
        fn: A function of the leaves.
        leaves: Example leaves; the floating-point ones are differentiated.
        names: Names of the gradients; numbers by default.
    """
    moving = [i for i, x in enumerate(leaves) if is_float(x)]

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
    floats = [x for x in jax.tree.leaves(out) if is_float(x)]
    if len(floats) == 1 and jnp.shape(floats[0]) == ():
        return floats[0].astype(jnp.promote_types(floats[0].dtype, jnp.float32))
    random = np.random.default_rng(0)
    total = jnp.zeros(())
    for x in floats:
        weight = random.standard_normal(jnp.shape(x)).astype(np.float32)
        total += jnp.sum(x * weight, dtype=jnp.float32) / max(1, np.size(weight)) ** 0.5
    return total


def _compare(
    name: str,
    plain: Any,
    fast: Any,
    leaves: list[Any],
    names: list[str],
    report: Report,
    pairs: Sequence[Pair],
    draws: int,
) -> Verification:
    try:
        shapes = jax.eval_shape(plain, *leaves)
    except Exception as error:
        raise trace.trace_error(plain, error) from error
    paths = [_path(p) for p, _ in jax.tree_util.tree_leaves_with_path(shapes)]

    def both(whole: Any, side: str) -> Any:
        def run(leaves: Sequence[Any]) -> list[Any]:
            sites = [getattr(p, side)(leaves) for p in pairs]
            return [*jax.tree.leaves(whole(*leaves)), *sites]

        return run

    from rewriter.verification.compare import compared

    found = compared(
        both(plain, "written"),
        both(fast, "replaced"),
        leaves,
        names,
        gradients=[k for k, p in enumerate(paths) if p.startswith("grad.")],
        errors=True,
        compiled=bool(pairs),
        again=draws,
    )
    paths += [f"{p.op} at {p.where}" for p in pairs]
    rows = tuple(_row(k, path, found) for k, path in enumerate(paths))
    notes = tuple(_notes(report, found, draws))
    return Verification(name, rows, notes, report, found.probes, found.silent, draws)


def _path(path: Any) -> str:
    text = jax.tree_util.keystr(path)
    if text.startswith("['grad']"):
        return f"grad.{path[1].key}"
    return text.removeprefix("['out']") or "out"


def _row(k: int, name: str, found: Comparison) -> Row:
    from rewriter.verification.check_sites import in_words

    verdict, off = found.verdicts[k], found.of(k)
    said = in_words(off) if off else ""
    numbers = verdict.original, verdict.error, verdict.allowed
    return Row(name, found.dtypes[k], *numbers, off is None, said, verdict.worst)


def _next(differs: str) -> str:
    return f"{differs[:1].upper()}{differs[1:]}. " if differs else ""


def _notes(report: Report, found: Comparison, draws: int) -> list[str]:
    notes = [found.note] if found.note else []
    if found.probes:
        also = f"{draws} draws and " if draws else ""
        notes.append(also + _probes_text(found))
    if far := sum(v.far for v in found.verdicts):
        notes.append(
            f"{far} rows are judged by the original: float64 gives grossly other values"
        )
    if unstable := sum(v.unstable for v in found.verdicts):
        notes.append(f"{unstable} rows tell nothing: rounding alone changes them")
    for site in report.sites:
        op = op_of(site)
        note = op.note(dict(site.params)) if op is not None and op.note else ""
        if note and site.replaced:
            notes.append(f"{site.where or site.op}: {note}")
    if not any(s.replaced for s in report.sites):
        notes.append("nothing was rewritten: both programs are the same")
        if report.sites:
            notes.append("implementation= forces kernels, also for small arguments")
    return list(dict.fromkeys(notes))


def _probes_text(found: Comparison) -> str:
    text = f"{found.probes} probes"
    if found.silent:
        names = ", ".join(found.silent[:2])
        text += f", of which {len(found.silent)} give no number as written ({names})"
    return text


def _place(row: Row) -> str:
    """Where the worst entry of a row is, in words."""
    return f"   worst at {[*row.worst]}" if row.worst and row.rewritten else ""


SHOWN = 8  # rows printed; failing ones are always shown


def _rank(row: Row) -> tuple[bool, bool, float]:
    """Failures first, then results, then gradients with the largest error first."""
    share = row.rewritten / row.allowed if row.allowed else row.rewritten
    return row.ok, row.name.startswith("grad."), -share if share == share else 0.0


def _lines(v: Verification) -> list[str]:
    dtypes = ", ".join(dict.fromkeys(r.dtype for r in v.rows))
    on = "drawn arguments" if v.drawn else "your arguments"
    lines = [f"rewriter.verify({v.name})   {dtypes} against f64, {on}"]
    ranked = sorted(v.rows, key=_rank)
    shown = [r for i, r in enumerate(ranked) if i < SHOWN or not r.ok]
    width = max((len(r.name) for r in shown), default=0)
    lines += [
        f" {r.name:<{width}}   original {r.original:.1e}   "
        f"rewritten {r.rewritten:.1e}   allowed {r.allowed:.1e}   "
        f"{'ok' if r.ok else 'OFF'}{_place(r)}" + (f" {r.differs}" if r.differs else "")
        for r in shown
    ]
    if len(shown) < len(v.rows):
        lines.append(f" ({len(v.rows) - len(shown)} more ok)")
    return lines + [f" {n}" for n in v.notes]
