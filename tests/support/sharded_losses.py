"""Run by test_sharding.py on eight devices: losses whose classes are split.

Values and gradients are compared with float64, with a kernel forced. No collective is
larger than the original's, and none is of another kind. No more memory is needed.
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
X = draw.normal(size=(B, T, K)).astype("f4")
W = draw.normal(size=(K, V)).astype("f4") / 2
BIAS = draw.normal(size=V).astype("f4")
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


LOSSES = (picked, of_totals, one_hot, smoothed, with_z, padded, ignoring)


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
    """

    loss: Callable[..., Any]
    logits: Callable[..., Any] | None = None
    w: Any = P(None, "model")
    rows: Any = P("data")
    asked: Any = None
    kind: Any = AxisType.Auto
    given: bool = False


def tied(x: Any, w: Any, bias: Any) -> Any:
    """Logits of an embedding, [v, k]."""
    del bias
    return jnp.einsum("btk,vk->btv", x, w)


def capped(x: Any, w: Any, bias: Any) -> Any:
    """Logits with a bias, a scale and a soft cap."""
    return 5 * jnp.tanh((x @ w * 0.5 + bias) / 5)


def rounded(x: Any, w: Any, bias: Any) -> Any:
    """Logits of a product of 16 bits."""
    del bias
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def product(x: Any, w: Any, bias: Any) -> Any:
    """A product."""
    del bias
    return x @ w


ALL = P(None, ("data", "model"))
CASES = (
    *(Case(loss, product) for loss in LOSSES),
    Case(picked, tied, w=P("model")),
    Case(of_totals, capped),
    Case(with_z, capped, w=ALL, rows=P()),
    Case(picked, product, w=P("data", "model")),
    Case(one_hot, product, w=P(), asked=P("data", None, "model")),
    Case(of_totals, product, asked=P("data", None, "model")),
    Case(of_totals, product, rows=P()),
    Case(with_z, product, w=P(None, "data")),
    Case(one_hot, product, kind=AxisType.Explicit),
    Case(smoothed, capped, kind=AxisType.Explicit),
    Case(of_totals, given=True, w=P("data", None, "model")),
    Case(smoothed, given=True, w=P("data", None, "model")),
    Case(padded, given=True, w=P("data", None, "model")),
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
    if case.given:
        arrays[0], specs[0] = X @ W, case.w
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
    wrong = []
    with jax.set_mesh(mesh):
        for name, original, fast in (
            ("forward", jax.jit(f), rewriter.optimize(f, implementation=FORCED)),
            ("step", jax.jit(step), rewriter.optimize(step, implementation=FORCED)),
            ("grad of optimized", jax.jit(step),
             jax.jit(jax.value_and_grad(
                 rewriter.optimize(f, implementation=FORCED), wrt))),
        ):  # fmt: skip
            before, after = (g.lower(*placed).compile() for g in (original, fast))
            got = after(*placed)
            wrong += [f"{name}: {w}" for w in _compared(before, after, got, case)]
            if hasattr(fast, "report"):
                sites = fast.report(*placed).sites
                if not sites or not all(s.replaced for s in sites):
                    why = [s.not_chosen for s in sites]
                    wrong.append(f"{name}: not replaced {why}")
                elif not any("v over" in s.sharding for s in sites):
                    if case.w != P(None, "data"):
                        wrong.append(f"{name}: {[s.sharding for s in sites]}")
    return wrong


@functools.cache
def _wide(case: Case) -> tuple[Any, Any]:
    """Value and gradients in float64, on one device."""
    one = dataclasses.replace(case, asked=None, kind=AxisType.Auto)
    with jax.enable_x64(True):
        f, arrays, _ = program(one, None)
        wide = [a.astype("f8") if a.dtype == "f4" else a for a in arrays]
        wrt = (0,) if case.given else (0, 1)
        return jax.tree.map(np.asarray, jax.value_and_grad(f, wrt)(*wide))


def _compared(before: Any, after: Any, got: Any, case: Case) -> list[str]:
    wrong = []
    value, grads = _wide(case)
    want = (value, grads) if isinstance(got, tuple) else value
    limit = 2e-2 if case.logits is rounded else 2e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a = np.asarray(a, "f8")
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            wrong.append("NaN elsewhere")
        error = np.linalg.norm(np.nan_to_num(a - b))
        if error > limit * np.linalg.norm(np.nan_to_num(b)):
            wrong.append(f"error {error / np.linalg.norm(np.nan_to_num(b)):.1e}")
    was, now = (collectives_in(c.as_text()) for c in (before, after))
    if extra := set(now) - set(was):
        wrong.append(f"also {extra}: {was} -> {now}")
    if received(now) > received(was):
        wrong.append(f"{received(now)} B between devices: {was} -> {now}")
    if memory(after) > 1.05 * memory(before) + (64 << 10):
        wrong.append(f"{memory(after)} B, before {memory(before)} B")
    if "-v" in sys.argv:
        print("   ", was, "->", now, memory(before), "->", memory(after))
    return wrong


def main() -> int:
    """Prints what is wrong; the number of wrong cases."""
    bad = 0
    for k, case in enumerate(CASES):
        if len(sys.argv) > 1 and sys.argv[-1].isdigit() and int(sys.argv[-1]) != k:
            continue
        wrong = checked(case)
        bad += bool(wrong)
        name = getattr(case.logits, "__name__", "given")
        print(k, case.loss.__name__, name, case.w, case.rows, case.asked or "",
              "BAD" if wrong else "", *wrong, sep=" ", flush=True)  # fmt: skip
    return bad


if __name__ == "__main__":
    sys.exit(main())
