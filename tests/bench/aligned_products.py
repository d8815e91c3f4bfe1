"""Matrix products with odd sizes on a GPU: as written, and padded by `align`.

  python3 -m tests.bench.aligned_products [--repeats N] [--small] [--write]

Each program runs as XLA has it, and with its 16-bit products padded, whatever the
estimate says. Milliseconds are medians by the wall clock, beside the estimates of both.
Takes about a minute.
"""

from __future__ import annotations

import argparse
import functools
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from rewriter.ops import device
from rewriter.rewrite.passes import aligned_products
from tests.bench import record
from tests.bench.vocabulary_loss_gpu import compiled, timed

Program = Callable[..., Any]


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def with_accuracy(x: jax.Array, w: jax.Array) -> Any:
    """A loss whose logits are read for an accuracy too."""
    y = (x @ w).astype(jnp.float32)
    labels = jnp.arange(x.shape[0]) % w.shape[1]
    own = jnp.take_along_axis(y, labels[:, None], -1)[:, 0]
    loss = (jax.nn.logsumexp(y, -1) - own).mean()
    return loss, (y.argmax(-1) == labels).mean()


def hidden(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Two layers with an odd size between them."""
    return jnp.square((jax.nn.gelu(x @ first) @ second).astype(jnp.float32)).mean()


def programs(small: bool) -> Iterator[tuple[str, Program, tuple[Any, ...]]]:
    """Programs by name, and what they take."""
    part = 32 if small else 1
    n, k, v = 8192 // part, 768 // part, 50257 // part + small
    yield "logits", lambda x, w: x @ w, (like(n, k), like(k, v))
    yield "logits of a table", lambda x, w: x @ w.T, (like(n, k), like(v, k))
    sums = lambda x, w: jax.nn.logsumexp((x @ w).astype(jnp.float32), -1)
    yield "log-sum-exps", sums, (like(n, k), like(k, v))
    yield "gradient of rows", lambda d, w: d @ w.T, (like(n, v), like(k, v))
    yield "gradient of weights", lambda x, d: x.T @ d, (like(n, k), like(n, v))
    taken = jax.value_and_grad(with_accuracy, (0, 1), has_aux=True)
    yield "loss with accuracy", taken, (like(n, k), like(k, v))
    m, f = 16384 // part, 30522 // part + 3 * small
    yield "logits of 30522", lambda x, w: x @ w, (like(m, k), like(k, f))
    for odd in (1001, 3001, 8193):
        h = odd if not small else odd // 16 | 1
        args = like(n, 2 * k), like(2 * k, h), like(h, 2 * k)
        yield f"hidden {odd}", jax.value_and_grad(hidden, (0, 1, 2)), args


def align(program: Program, args: tuple[Any, ...], kind: str) -> tuple[Program, Any]:
    """A program with all odd products padded, and their estimates."""
    closed, tree = jax.make_jaxpr(program, return_shape=True)(*args)
    here = device.of(kind, "cuda")
    with (
        mock.patch.object(aligned_products, "GAIN", 1e9),
        mock.patch.object(aligned_products, "LEAST_S", -1e9),
        mock.patch.object(aligned_products._Body, "_more_memory", return_value=0.0),
    ):
        after, found = aligned_products.PASS(closed, here)
    structure = jax.tree.structure(tree)

    @functools.wraps(program)
    def run(*given: jax.Array) -> Any:
        outs = jax.core.eval_jaxpr(after.jaxpr, after.consts, *given)
        return jax.tree.unflatten(structure, outs)

    return run, found


def main() -> None:
    """Measures all programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    kind = "h100" if given.small else jax.devices()[0].device_kind
    plan = []
    with ThreadPoolExecutor(4) as pool:
        for name, program, args in programs(given.small):
            fast, found = align(program, args, kind)
            futures = [pool.submit(compiled, p, args) for p in (program, fast)]
            plan.append((name, args, found, futures))
    rows = []
    for name, args, found, futures in plan:
        row: dict[str, Any] = {"program": name, "products": len(found)}
        for n in ("before", "after"):
            row[f"estimated_{n}_ms"] = round(1e3 * sum(getattr(a, n) for a in found), 3)
        try:
            real = [jnp.full(a.shape, 0.01, a.dtype) for a in args]
            for form, future in zip(("written", "padded"), futures, strict=True):
                row[form], _ = timed(future.result()[0], real, given.repeats)
            row["faster"] = round(row["written"]["ms"] / row["padded"]["ms"], 3)
        except Exception as problem:
            row["failed"] = "".join(traceback.format_exception_only(problem))[:300]
        rows.append(row)
        print(row, flush=True)
    if given.write:
        words = kind.lower().removeprefix("nvidia ").split()
        path = record.named(f"aligned_products_{words[0]}")
        record.write(path, "python3 -m tests.bench.aligned_products --write", rows=rows)


if __name__ == "__main__":
    main()
