"""The loss over a vocabulary that holds logits of one chunk only.

The usual form writes all logits, [rows, v], and automatic differentiation keeps them
and their exponentials. This one loops over blocks of rows and, inside, over chunks of
classes. It keeps the log-sum-exp of each row, and computes the logits again in the
backward pass: one more product, for two arrays of [rows, v] fewer in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import Loss
from rewriter.kernels.cross_entropy.xla import (
    gradient,
    is_float,
    known_outside,
    labels_of,
)
from rewriter.kernels.linear_cross_entropy.reference import logits_of
from rewriter.ops.device import Device
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Space, Spec, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no


@dataclass(frozen=True)
class Chunk:
    """The config of both passes.

    Attributes:
        budget: The most bytes of logits that are held at once. Chunks have at least
            `LEAST` classes, whatever the budget.
    """

    budget: int = 1 << 25


DEFAULT = Chunk()
LARGE = Chunk(1 << 28)
"""For GPUs and TPUs, which need large products."""

LEAST = 64
"""The fewest classes of a chunk, and the fewest rows of a block."""

PAYS_FROM = 1 << 26
"""The fewest bytes of logits for which the memory is worth another product."""


def default(spec: Spec, device: Device) -> Chunk:
    """Returns the chunk for a CPU, or a larger one."""
    del spec
    return DEFAULT if device.platform == "cpu" else LARGE


def configs(spec: Spec, device: Device) -> list[Chunk]:
    """Returns budgets worth measuring, of fewer bytes than all logits have."""
    shifts = (22, 26, 28) if device.platform == "cpu" else (26, 27, 29, 30)
    return [Chunk(1 << s) for s in shifts if 1 << s < _bytes(spec)]


def supports(spec: Spec) -> Verdict:
    """Takes real floating operands, weights [k, v] and a label for each row."""
    floats = [n for n in spec.operands if n != "labels"]
    return all_of(
        *(is_float(spec, n) for n in floats),
        _matrix(spec),
        labels_of(spec, "x"),
        known_outside(spec),
    )


def _matrix(spec: Spec) -> Verdict:
    shape = spec.shape("w")
    if len(shape) == 2 and shape[0] == spec.shape("x")[-1]:
        return YES
    return no("shape", f"w is {shape}, expected ({spec.shape('x')[-1]}, v)")


def _bytes(spec: Spec) -> int:
    return math.prod(spec.shape("x")[:-1]) * spec.shape("w")[-1] * 4


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for logits of 64 MiB or more in float32."""
    return profitable_backward(spec, platform, 1)


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns the same for logits that are kept `count` times for gradients."""
    if platform != "cpu":
        return no("platform", f"not measured to be as fast as XLA on {platform}")
    if spec.symbolic:
        return YES
    size = _bytes(spec) * count
    if size >= PAYS_FROM:
        return YES
    return no("small", f"logits of {size >> 10} KiB are so small that XLA is as fast")


Rows = dict[str, jax.Array]
"""Arrays by name, rows first."""


@dataclass(frozen=True)
class Head:
    """What makes logits of rows.

    Attributes:
        w: The weights, [k, v].
        bias: What is added, [v], or None.
        scale: Multiplies the product.
        soft_cap: The bound of the logits; 0 for none.
        precision: Of the products.
        narrow: The dtype of the logits' gradients.
    """

    w: jax.Array
    bias: jax.Array | None
    scale: float
    soft_cap: float
    precision: str | None
    narrow: Any

    def chunk(self, start: Any, size: int) -> Head:
        """The same for some classes."""
        w = lax.dynamic_slice_in_dim(self.w, start, size, 1)
        bias = self.bias
        if bias is not None:
            bias = lax.dynamic_slice_in_dim(bias, start, size)
        return Head(w, bias, self.scale, self.soft_cap, self.precision, self.narrow)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits of rows [n, k], in float32 or float64."""
        return logits_of(
            x, self.w, self.bias, self.scale, self.soft_cap, self.precision
        )

    def back(self, x: jax.Array, y: jax.Array, d: jax.Array) -> Rows:
        """Cotangents of rows and weights, from the logits and their cotangents."""
        if self.soft_cap:
            d = d * (1 - jnp.square(y / self.soft_cap))
        sums = {} if self.bias is None else {"bias": d.sum(0)}
        d = (d * self.scale if self.scale != 1 else d).astype(self.narrow)
        return {
            "x": self._dot(d, self.w.astype(self.narrow), (1, 1)),
            "w": self._dot(x.astype(self.narrow), d, (0, 0)),
            **sums,
        }

    def _dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        wide = jnp.promote_types(self.narrow, jnp.float32)
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(
            a, b, dims, precision=self.precision, preferred_element_type=wide
        )


def forward(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Chunk | None = None,
    **how: Any,
) -> Any:
    """Returns the losses, and with `residuals` the log-sum-exps.

    Args:
        config: The chunk.
        **how: Parameters of the op, as in `reference`.
    """
    head, loss = _head_and_loss(x, w, bias, **how)
    rows, columns = _sizes(x, w, config or DEFAULT)

    def block(part: Rows, _: None) -> tuple[None, Rows]:
        classes = loss.labels(part["labels"])
        lse, picked, total = _reduced(head, part["x"], classes, columns)
        value = loss.value(lse, picked, total, classes)
        return None, {"out": value.astype(out_dtype or value.dtype), "lse": lse}

    _, made = _over_blocks(block, _flat(x, labels), None, rows)
    out = made["out"].reshape(labels.shape)
    return (out, (made["lse"].reshape(labels.shape),)) if residuals else out


def _head_and_loss(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    precision: str | None = None,
    logits_dtype: str | None = None,
    **loss: Any,
) -> tuple[Head, Loss]:
    """What makes logits, and what a loss is of them, by the op's parameters."""
    narrow = jnp.dtype(logits_dtype) if logits_dtype else jnp.result_type(x, w)
    head = Head(w, bias, scale, soft_cap, precision, narrow)
    return head, Loss(w.shape[1], **loss)


def _reduced(
    head: Head, x: jax.Array, labels: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-sum-exps, picked logits and sums of logits of rows [n, k]."""
    wide = jnp.promote_types(jnp.result_type(x, head.w), jnp.float32)

    def step(start: Any, size: int, carry: Any) -> Any:
        top, weight, picked, total = carry
        y = head.chunk(start, size).logits(x)
        new = jnp.maximum(top, y.max(1))
        shift = jnp.where(jnp.isfinite(new), new, 0)
        kept = jnp.where(weight == 0, 0, weight * jnp.exp(top - shift))
        weight = kept + jnp.exp(y - shift[:, None]).sum(1)
        picked = picked + jnp.where(_hits(labels, start, size), y, 0).sum(1)
        return new, weight, picked, total + y.sum(1)

    zero = jnp.zeros(x.shape[:1], wide)
    carry = (jnp.full_like(zero, -jnp.inf), zero, zero, zero)
    top, weight, picked, total = _over_chunks(step, carry, head.w.shape[1], columns)
    lse = jnp.log(weight) + jnp.where(jnp.isfinite(top), top, 0)
    return lse, picked, total


def backward(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    out: None,
    residuals: tuple[jax.Array],
    cotangent: jax.Array,
    bias: jax.Array | None = None,
    out_dtype: str | None = None,
    config: Chunk | None = None,
    **how: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every float operand."""
    del out, out_dtype
    (lse,) = residuals
    head, loss = _head_and_loss(x, w, bias, **how)
    rows, columns = _sizes(x, w, config or DEFAULT)
    wide = lse.dtype

    def block(part: Rows, sums: Rows) -> tuple[Rows, Rows]:
        known = part | {"classes": loss.labels(part["labels"])}
        sums, dx = _gradients(head, loss, known, sums, columns)
        return sums, {"x": dx.astype(x.dtype)}

    parts = _flat(x, labels, lse=lse, cotangent=cotangent.astype(wide))
    sums, by_row = _over_blocks(block, parts, _zeros(w, bias, wide), rows)
    return _like(x, w, bias, by_row["x"], sums)


def _zeros(w: jax.Array, bias: jax.Array | None, wide: Any) -> Rows:
    """Where cotangents of weights and bias are added up."""
    wholes = {"w": w} if bias is None else {"w": w, "bias": bias}
    return {n: jnp.zeros(a.shape, wide) for n, a in wholes.items()}


def _like(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, dx: jax.Array, sums: Rows
) -> Rows:
    """Cotangents like the operands."""
    found = {"x": dx.reshape(x.shape), "w": sums["w"].astype(w.dtype)}
    return found if bias is None else found | {"bias": sums["bias"].astype(bias.dtype)}


def _gradients(
    head: Head,
    loss: Loss,
    known: Rows,
    sums: Rows,
    columns: int,
    logits: Callable[[Any, int], jax.Array] | None = None,
) -> tuple[Rows, jax.Array]:
    """Sums with the cotangents of some rows added, and those of the rows.

    Args:
        head: What makes logits.
        loss: The loss.
        known: Of each row: x, classes, log-sum-exp and cotangent.
        sums: Cotangents of weights and bias so far.
        columns: Classes of a chunk.
        logits: ``logits(start, size)`` gives logits of some classes, if they are held.
    """
    rows, classes = known["x"], known["classes"]

    def step(start: Any, size: int, carry: Any) -> Any:
        dx, sums = carry
        some = head.chunk(start, size)
        y = some.logits(rows) if logits is None else logits(start, size)
        hits = _hits(classes, start, size)
        d = gradient(loss, y, known["lse"], classes, hits, known["cotangent"])
        found = some.back(rows, y, d)
        added = {n: _added(s, found[n], start, size) for n, s in sums.items()}
        return dx + found["x"], added

    zero = jnp.zeros(rows.shape, known["lse"].dtype)
    dx, sums = _over_chunks(step, (zero, sums), head.w.shape[1], columns)
    return sums, dx


def together(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    cotangent: jax.Array,
    bias: jax.Array | None = None,
    out_dtype: str | None = None,
    config: Chunk | None = None,
    **how: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the losses and all cotangents, from logits that are computed once.

    It holds all logits of a block of rows. Where the budget is too small for `LEAST`
    rows it is `forward` and `backward`.
    """
    most = (config or DEFAULT).budget // 4 // w.shape[1]
    if most < LEAST:
        own = {"x": x, "w": w, "labels": labels, "bias": bias, "config": config,
               "out_dtype": out_dtype, **how}  # fmt: skip
        out, saved = forward(**own, residuals=True)
        given = {"out": None, "residuals": saved, "cotangent": cotangent}
        return out, backward(**own, **given)
    head, loss = _head_and_loss(x, w, bias, **how)
    count = math.prod(x.shape[:-1])
    rows = _equal(count, most)
    columns = _equal(w.shape[1], max(w.shape[1] // 8, LEAST))

    def block(part: Rows, sums: Rows) -> tuple[Rows, Rows]:
        classes = loss.labels(part["labels"])
        y = head.logits(part["x"])
        lse = jax.nn.logsumexp(y, axis=1)
        picked = jnp.where(_hits(classes, 0, y.shape[1]), y, 0).sum(1)
        value = loss.value(lse, picked, y.sum(1), classes)

        def some(start: Any, size: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(y, start, size, 1)

        known = part | {"lse": lse, "classes": classes}
        sums, dx = _gradients(head, loss, known, sums, columns, some)
        return sums, {"x": dx.astype(x.dtype), "out": value}

    wide = jnp.promote_types(jnp.result_type(x, w), jnp.float32)
    parts = _flat(x, labels, cotangent=cotangent.astype(wide))
    sums, made = _over_blocks(block, parts, _zeros(w, bias, wide), rows)
    out = made["out"].reshape(labels.shape).astype(out_dtype or wide)
    return out, _like(x, w, bias, made["x"], sums)


def _added(sums: jax.Array, more: jax.Array, start: Any, size: int) -> jax.Array:
    """Adds to some classes of an array."""
    axis = sums.ndim - 1
    old = lax.dynamic_slice_in_dim(sums, start, size, axis)
    return lax.dynamic_update_slice_in_dim(sums, old + more, start, axis)


def _hits(labels: jax.Array, start: Any, size: int) -> jax.Array:
    """Which of some classes each row picks, [rows, size]."""
    columns = lax.broadcasted_iota(jnp.int32, (size,), 0) + start
    return labels[:, None] == columns


def _sizes(x: jax.Array, w: jax.Array, config: Chunk) -> tuple[int, int]:
    """Rows of a block and classes of a chunk, equal ones where possible."""
    numbers = max(config.budget // 4, 1)
    count, classes = math.prod(x.shape[:-1]), w.shape[1]
    rows = _equal(count, max(numbers // LEAST, LEAST))
    return rows, _equal(classes, max(numbers // max(rows, 1), LEAST))


def _equal(n: int, most: int) -> int:
    """The size of the fewest equal parts of at most some size, a multiple of 8."""
    if n <= most:
        return n
    size = -(-n // -(-n // most))
    return min(-(-size // 8) * 8, most)


def _over_chunks(
    step: Callable[[Any, int, Any], Any], carry: Any, classes: int, size: int
) -> Any:
    """Runs ``step(start, size, carry)`` over chunks of classes and a rest."""
    whole = classes // size if size else 0
    if whole > 1:
        carry = lax.fori_loop(0, whole, lambda i, c: step(i * size, size, c), carry)
    elif whole:
        carry = step(0, size, carry)
    rest = classes - whole * size
    return step(whole * size, rest, carry) if rest else carry


def _flat(x: jax.Array, labels: jax.Array, **more: jax.Array) -> Rows:
    """The arrays, with one axis of rows."""
    count = math.prod(x.shape[:-1])
    flat = {n: a.reshape(count) for n, a in (more | {"labels": labels}).items()}
    return flat | {"x": x.reshape(count, x.shape[-1])}


def _over_blocks(
    block: Callable[[Rows, Any], tuple[Any, Rows]], rows: Rows, sums: Any, size: int
) -> tuple[Any, Rows]:
    """Runs a function over blocks of rows, handing on its first results."""
    count = rows["x"].shape[0]
    whole = count // size * size if size else 0
    if whole <= size:
        whole = 0
        made = []
    else:
        parts = {n: a[:whole].reshape(-1, size, *a.shape[1:]) for n, a in rows.items()}
        sums, out = lax.scan(lambda s, part: block(part, s), sums, parts)
        made = [jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), out)]
    if whole < count or not count:
        sums, rest = block({n: a[whole:] for n, a in rows.items()}, sums)
        made.append(rest)
    return sums, jax.tree.map(lambda *ys: jnp.concatenate(ys), *made)


def _saves(spec: Spec) -> list[Any]:
    """The log-sum-exp of each row."""
    narrow = jnp.result_type(spec.dtype("x"), spec.dtype("w"))
    wide = jnp.promote_types(narrow, jnp.float32)
    return [(spec.shape("labels"), wide)]


KERNEL = Kernel(
    name="memory_bounded",
    op="linear_cross_entropy",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=backward,
    together=together,
    limits=Limits(supports),
    speed=Speed(profitable, profitable_backward),
    traits=Traits(memory_bounded=True, saves_out=False, saves=_saves),
    space=Space(Chunk, default, configs),
    backward_space=Space(Chunk, default, configs),
)
