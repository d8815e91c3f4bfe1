"""Times functions of scores on a Hopper GPU, beside PyTorch's FlexAttention.

    python3 -m tests.bench.scored_gpu [--batch 8] [--tokens 4096] [--widths 128,64]
        [--functions a,b] [--json PATH]

A row is attention of 16 heads with one function, forward or with the gradients of q, k
and v. Its arms are the kernel (`hopper`), the program as XLA compiles it (`written`,
where its scores fit into memory), and FlexAttention by ``torch.compile``, where PyTorch
is importable. Rows of a menu have a kernel's own operand for the function: its time
shows what it costs to compute the function as written. Microseconds on the device:
medians by CUPTI for JAX, by CUDA's events for PyTorch.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench import choices, record
from tests.bench.choices import BF16, F32, Row
from tests.spellings.attention.scores import bucket

HEADS = 16
XLA_BYTES = 12 << 30

Score = Callable[..., Any]


@dataclass(frozen=True)
class Function:
    """A function of scores for JAX and for PyTorch.

    Attributes:
        of: Takes products [b, n, t, s], numbers of queries [t, 1] and of keys [1, s],
            and the array.
        flex: FlexAttention's: product, batch, head, query, key, array.
        array: The array's shape, or nothing.
        op: What the function is read as.
        causal: Whether later keys are hidden.
    """

    of: Score
    flex: Score
    array: tuple[int, ...] = ()
    op: str = "scored_attention"
    causal: bool = True


def _heads(r: Any) -> Any:
    return r[:, None, None]


def _torch_bucket(distance: Any) -> Any:
    import torch

    half, exact, largest = 16, 8, 128
    ahead = torch.where(distance > 0, half, 0)
    away = torch.abs(distance)
    far = torch.log(torch.clamp(away, min=1).float() / exact)
    far = exact + (far / math.log(largest / exact) * (half - exact)).to(torch.int32)
    return ahead + torch.where(away < exact, away, torch.clamp(far, max=half - 1))


def _torch() -> Any:
    import torch

    return torch


FUNCTIONS = {
    "cap (menu)": Function(
        lambda x, i, j: 30 * jnp.tanh(x / 30),
        lambda x, b, h, i, j: 30 * _torch().tanh(x / 30), op="attention",
    ),
    "cap of each head": Function(
        lambda x, i, j, r: _heads(r) * jnp.tanh(x / _heads(r)),
        lambda x, b, h, i, j, r: r[h] * _torch().tanh(x / r[h]), (HEADS,),
    ),
    "ALiBi (menu)": Function(
        lambda x, i, j, r: x + _heads(r) * (j - i),
        lambda x, b, h, i, j, r: x + r[h] * (j - i), (HEADS,), op="attention",
    ),
    "log of distance": Function(
        lambda x, i, j, r: x - _heads(r) * jnp.log1p(jnp.abs(i - j).astype(F32)),
        lambda x, b, h, i, j, r: x - r[h] * _torch().log1p(_torch().abs(i - j).float()),
        (HEADS,),
    ),
    "decay": Function(
        lambda x, i, j, r: x * jnp.exp(-_heads(r) * jnp.abs(i - j).astype(F32)),
        lambda x, b, h, i, j, r: x * _torch().exp(-r[h] * _torch().abs(i - j).float()),
        (HEADS,),
    ),
    "softplus": Function(
        lambda x, i, j: jax.nn.softplus(x),
        lambda x, b, h, i, j: _torch().nn.functional.softplus(x), causal=False,
    ),
    "T5's buckets, capped": Function(
        lambda x, i, j, r: jnp.tanh(x) + jnp.transpose(
            r[bucket(j - i, 32, 128)], (2, 0, 1)),
        lambda x, b, h, i, j, r: _torch().tanh(x) + r[_torch_bucket(j - i), h],
        (32, HEADS), causal=False,
    ),
    "tanh and distance": Function(
        lambda x, i, j, r: jnp.tanh(x) - _heads(r) * jnp.abs(i - j),
        lambda x, b, h, i, j, r: _torch().tanh(x) - r[h] * _torch().abs(i - j),
        (HEADS,),
    ),
}  # fmt: skip


def program(function: Function, width: int) -> Callable[..., Any]:
    """Returns attention by one function, as models write it."""

    def attend(q: Any, k: Any, v: Any, *array: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=F32)
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        x = function.of(x * width**-0.5, i, j, *array)
        x = jnp.where(j <= i, x, -jnp.inf) if function.causal else x
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, -1).astype(BF16), v)

    return attend


def row_of(name: str, function: Function, b: int, t: int, width: int) -> Row:
    """Returns a row of `choices`, with gradients of q, k and v alone."""
    shapes: tuple[Any, ...] = (((b, t, HEADS, width), BF16),) * 3
    if function.array:
        shapes = (*shapes, (function.array, F32))
    return Row(
        f"{name}, {b}x{t}x{HEADS}x{width}", function.op, program(function, width),
        shapes, ("hopper",), scores=4.0 * b * HEADS * t * t,
    )  # fmt: skip


def of_pass(row: Row, passes: str) -> Row:
    """Returns the row, or one that returns gradients of q, k and v too."""
    if passes == "forward":
        return row

    def both(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *array, up = more
        out, back = jax.vjp(lambda q, k, v: row.fn(q, k, v, *array), q, k, v)
        return out, back(up)

    return replace(row, fn=both, shapes=(*row.shapes, row.shapes[0]))


def flex_us(function: Function, row: Row, passes: str) -> float:
    """Returns microseconds of FlexAttention.

    Raises:
        ImportError: If PyTorch is not there.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    b, t, n, h = row.shapes[0][0]
    torch._dynamo.reset()  # it gives up after eight programs
    torch.manual_seed(0)
    make = lambda: torch.randn(b, n, t, h, device="cuda", dtype=torch.bfloat16)
    q, k, v, up = (make() for _ in range(4))
    array = torch.rand(*function.array, device="cuda") if function.array else None
    mod = function.flex if array is None else functools.partial(_with, function, array)
    mask = None
    if function.causal:
        see = lambda b, h, i, j: j <= i
        mask = create_block_mask(see, None, None, t, t, device="cuda")
    run = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=mod, block_mask=mask),
        dynamic=False,
    )
    if passes != "forward":
        for x in (q, k, v):
            x.requires_grad_(True)

    def step() -> None:
        out = run(q, k, v)
        if passes != "forward":
            torch.autograd.grad(out, (q, k, v), up)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


def _with(
    function: Function, array: Any, x: Any, b: Any, h: Any, i: Any, j: Any
) -> Any:
    return function.flex(x, b, h, i, j, array)


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--functions", default=",".join(FUNCTIONS).replace(", ", "; "))
    parser.add_argument("--flex", action="store_true", help="time PyTorch too")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    names = [x.strip() for x in asked.functions.split(",")]
    todo = []
    for name in (n.replace("; ", ", ") for n in names):
        for width in map(int, asked.widths.split(",")):
            function = FUNCTIONS[name]
            row = row_of(name, function, asked.batch, asked.tokens, width)
            todo += [(function, of_pass(row, x), x) for x in ("forward", "both")]
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = []
        for _, row, passes in todo:
            shapes = tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)
            arms = ["chosen", "hopper"]
            arms += ["written"] if row.scores <= XLA_BYTES else []
            one = functools.partial(pool.submit, choices.compiled, row, passes)
            made.append({by: one(by, shapes) for by in arms})
        wait([x for arms in made for x in arms.values()])  # time nothing beside it
        for (function, row, passes), arms in zip(todo, made, strict=True):
            found = choices.measured(row, passes, arms)
            if asked.flex:
                try:
                    found["us"]["flex"] = round(flex_us(function, row, passes), 1)
                except Exception as problem:
                    found["failed"]["flex"] = repr(problem)[:300]
            print(json.dumps(found, default=str), flush=True)
            rows.append(found)
            if asked.json:
                record.write(asked.json, "python3 -m tests.bench.scored_gpu", rows=rows)


if __name__ == "__main__":
    main()
