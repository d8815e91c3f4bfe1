"""Run by test_sharding.py on eight devices: losses whose classes are split.

``python -m tests.support.sharded_losses [--brief] [NUMBER]``. Values and gradients are
compared with float64, with a kernel forced. Collectives are no larger than the
original's, and none is of another kind. No more memory is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.kernels.linear_cross_entropy import chunks as of_chunks
from rewriter.program.collectives import collectives_in
from tests.support.sharded_programs import memory, received

FORCED = {
    "linear_cross_entropy": "memory_bounded", "cross_entropy": "memory_bounded",
}  # fmt: skip
of_chunks.DEFAULT = of_chunks.Chunk(1 << 14, least=8)
B, T, K, V = 8, 64, 16, 1024
draw = np.random.default_rng(0)
rounded = lambda step, *shape: (draw.normal(size=shape) / step).round() * step
X = rounded(1 / 4, B, T, K).astype("f4")
W = rounded(1 / 16, K, V).astype("f4") / 2
BIAS = rounded(1 / 16, V).astype("f4")
LABELS = draw.integers(0, V, (B, T)).astype("i4")
LABELS[:, ::7] = -1
LABELS[0, :8] = [0, V // 2 - 1, V // 2, V - 1, V, 2 * V, -V, 5]
MESH = (4, 2), ("data", "model")


def picked(y: Any, labels: Any) -> Any:
    """Log-probabilities, by index."""
    logp = jax.nn.log_softmax(y)
    return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


def of_totals(y: Any, labels: Any) -> Any:
    """The log-sum-exp less the picked logit, with labels kept inside."""
    own = jnp.take_along_axis(y, labels.clip(0, V - 1)[..., None], -1)[..., 0]
    return jax.nn.logsumexp(y, -1) - own


def one_hot(y: Any, labels: Any) -> Any:
    """A product with one-hot rows."""
    return -(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(y)).sum(-1)


def smoothed(y: Any, labels: Any) -> Any:
    """One-hot rows that are mixed with all classes."""
    target = 0.9 * jax.nn.one_hot(labels, V) + 0.1 / V
    return -(target * jax.nn.log_softmax(y)).sum(-1)


def with_z(y: Any, labels: Any) -> Any:
    """One-hot rows, and the square of the log-sum-exp."""
    return one_hot(y, labels) + 1e-2 * jax.nn.logsumexp(y, -1) ** 2


def padded(y: Any, labels: Any) -> Any:
    """The last classes only pad the vocabulary; all those of one device, too."""
    used = jnp.arange(V) < V // 2 - 100
    return of_totals(jnp.where(used, y, -1e30), labels.clip(0, V // 2 - 101))


def ignoring(y: Any, labels: Any) -> Any:
    """Rows without a label have no loss."""
    return jnp.where(labels >= 0, of_totals(y, labels), 0)


def two_labels(y: Any, labels: Any) -> Any:
    """Each row's label, and the next one's."""
    return 0.3 * of_totals(y, labels) + 0.7 * of_totals(y, jnp.roll(labels, 1, 1))


def mixed(y: Any, labels: Any) -> Any:
    """One-hot rows of two labels, with a share for each row, and smoothed."""
    share = (labels.astype("float32") / V)[..., None]
    hot = lambda a: jax.nn.one_hot(a, V)
    target = share * hot(labels) + (1 - share) * hot(jnp.roll(labels, 1, 1))
    return -((0.9 * target + 0.1 / V) * jax.nn.log_softmax(y)).sum(-1)


LOSSES = (picked, of_totals, one_hot, smoothed, with_z, padded, ignoring)
LOSSES += (two_labels, mixed)


BY_CLASS, BY_ROW = P(None, "model"), P("data")


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss on a mesh.

    Attributes:
        loss: Of logits and labels.
        logits: Of x, w and bias.
        w: How the weights are split.
        rows: How rows are split.
        asked: How logits are split, if the program asks for that.
        kind: Of the axes of the mesh.
        given: Whether logits are given in place of x and w.
        over: How the site says that it is split; ``""`` if it is left to XLA.
        brief: Whether it is part of every run of the tests.
    """

    loss: Callable[..., Any]
    logits: Callable[..., Any] | None = None
    w: Any = BY_CLASS
    rows: Any = BY_ROW
    asked: Any = None
    kind: Any = AxisType.Auto
    given: bool = False
    over: str = "v over model"
    brief: bool = False


def tied(x: Any, w: Any, bias: Any) -> Any:
    """Logits of an embedding, [v, k]."""
    del bias
    return jnp.einsum("btk,vk->btv", x, w)


def capped(x: Any, w: Any, bias: Any) -> Any:
    """Logits with a bias, a scale and a soft cap."""
    return 5 * jnp.tanh((x @ w * 0.5 + bias) / 5)


def product(x: Any, w: Any, bias: Any) -> Any:
    """A product."""
    del bias
    return x @ w


def high(x: Any, w: Any, bias: Any) -> Any:
    """Logits with a bias near 1,000, exact in float32."""
    return x @ w + bias


ALL = P(None, ("data", "model"))
CLASSES = P("data", None, "model")
CASES = (
    *(Case(loss, product) for loss in LOSSES),
    Case(picked, tied, w=P("model")),
    Case(of_totals, capped),
    Case(smoothed, high),
    Case(picked, high, brief=True),
    Case(with_z, product, w=ALL, rows=P(), over="v over data and model"),
    Case(picked, product, w=P("data", "model")),
    Case(one_hot, product, w=P(), asked=CLASSES, over=""),
    Case(of_totals, product, asked=CLASSES),
    Case(of_totals, product, rows=P()),
    Case(with_z, high, w=P(None, "data"), over="v over data"),
    Case(with_z, product, w=P("data"), over="...2 over data"),
    Case(one_hot, product, kind=AxisType.Explicit, brief=True),
    Case(smoothed, capped, kind=AxisType.Explicit),
    Case(padded, product, brief=True),
    Case(of_totals, given=True, w=CLASSES),
    Case(smoothed, given=True, w=CLASSES, brief=True),
    Case(padded, given=True, w=CLASSES),
    Case(two_labels, high, w=ALL, rows=P(), over="v over data and model"),
    Case(mixed, given=True, w=CLASSES),
)  # fmt: skip


def program(case: Case, mesh: Any) -> tuple[Any, list[Any], list[Any]]:
    """A mean loss, its arguments, and how they are split."""

    def of_rows(x: Any, w: Any, bias: Any, labels: Any) -> Any:
        y = case.logits(x, w, bias) if case.logits else x
        if case.asked is not None:
            spec = NamedSharding(mesh, case.asked)
            y = jax.lax.with_sharding_constraint(y, spec)
        return case.loss(y, labels).mean()

    specs = [case.rows, case.w, P(case.w[-1] if case.w else None), case.rows]
    weights = W.T.copy() if case.logits is tied else W
    arrays = [X, weights, BIAS, LABELS]
    if case.logits is high:
        arrays[2] = BIAS + np.float32(1000)
    if case.given:
        arrays[0], specs[0] = X @ W + np.float32(1000), case.w
        specs[1:3] = P(), P()
    return of_rows, arrays, specs


def checked(case: Case) -> list[str]:
    """What is wrong with a case."""
    mesh = jax.make_mesh(*MESH, axis_types=(case.kind,) * 2)
    f, arrays, specs = program(case, mesh)
    wrt = (0,) if case.given else (0, 1)
    step = jax.value_and_grad(f, wrt)
    placed = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, specs, strict=True)
    ]
    fast = functools.partial(rewriter.optimize, implementation=FORCED)
    later = jax.value_and_grad(fast(f), wrt)
    programs = {
        "forward": (jax.jit(f), fast(f)),
        "step": (jax.jit(step), fast(step)),
        "differentiated later": (jax.jit(step), jax.jit(later)),
    }
    if "--brief" in sys.argv:
        del programs["forward"]
    wrong = []
    with jax.set_mesh(mesh):
        for name, (original, new) in programs.items():
            before, after = (g.lower(*placed).compile() for g in (original, new))
            wrong += [f"{name}: {w}" for w in _compared(before, after, placed, case)]
            if hasattr(new, "report"):
                sites = new.report(*placed).sites
                wrong += [f"{name}: {w}" for w in _kept(sites, case, name)]
    return wrong


def _kept(sites: Any, case: Case, name: str) -> list[str]:
    """What is wrong with the sites."""
    (site,) = sites
    if bool(case.over) != site.replaced or case.over not in site.sharding:
        return [f"{site.sharding} {site.not_chosen}"]
    found = site.backward or name != "step" or not case.over
    return [] if found else ["no gradients"]


@functools.cache
def _wide(case: Case) -> tuple[Any, Any]:
    """Value and gradients in float64, on one device."""
    one = dataclasses.replace(case, asked=None, kind=AxisType.Auto)
    with jax.enable_x64(True):
        f, arrays, _ = program(one, None)
        wide = [a.astype("f8") if a.dtype == "f4" else a for a in arrays]
        wrt = (0,) if case.given else (0, 1)
        return jax.tree.map(np.asarray, jax.value_and_grad(f, wrt)(*wide))


def _compared(before: Any, after: Any, args: Any, case: Case) -> list[str]:
    """What is wrong with a rewritten program."""
    wrong, got, (value, grads) = [], after(*args), _wide(case)
    want = (value, grads) if isinstance(got, tuple) else value
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a = np.asarray(a, "f8")
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            wrong.append("NaN elsewhere")
        off, size = (np.linalg.norm(np.nan_to_num(x)) for x in (a - b, b))
        if off > 2e-5 * size:
            wrong.append(f"error {off / size:.1e}")
    was, now = (collectives_in(c.as_text()) for c in (before, after))
    if extra := set(now) - set(was):
        wrong.append(f"also {extra}: {was} -> {now}")
    if received(now) > received(was):
        wrong.append(f"{received(now)} B between devices: {was} -> {now}")
    if not case.given and memory(after) > 1.05 * memory(before) + (64 << 10):
        wrong.append(f"{memory(after)} B, before {memory(before)} B")
    if "-v" in sys.argv:
        print("   ", was, "->", now, memory(before), "->", memory(after))
    return wrong


def main() -> int:
    """Prints what is wrong; the number of wrong cases."""
    bad, numbers = 0, [int(a) for a in sys.argv[1:] if a.isdigit()]
    for k, case in enumerate(CASES):
        if k not in numbers if numbers else "--brief" in sys.argv and not case.brief:
            continue
        wrong = checked(case)
        bad += bool(wrong)
        print("BAD" if wrong else "ok", k, case.loss.__name__,
              getattr(case.logits, "__name__", "given"), case.w, case.rows,
              case.asked or "", *wrong, flush=True)  # fmt: skip
    return bad


if __name__ == "__main__":
    sys.exit(main())
