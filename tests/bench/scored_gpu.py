"""Times functions of scores on a Hopper GPU, beside PyTorch's FlexAttention.

    python3 -m tests.bench.scored_gpu [--only cap,decay] [--arms chosen,flex]
        [--batch 8] [--tokens 4096] [--widths 128,64] [--processes 8] [--json PATH]

A row is attention of 16 heads with one function, forward or with the gradients of q, k
and v, and of the buckets of T5. Its arms:

- ``chosen``: what `rewriter.optimize` takes, for the program with its gradients.
- ``inside``: the gradients of what `rewriter.optimize` takes for the forward.
- ``written``: the program as XLA compiles it.
- ``cudnn``: that kernel, where it takes the function.
- ``flex``: FlexAttention by ``torch.compile``, where PyTorch is importable, on the same
  arrays.

Rows of a menu have a kernel's own operand for the function: the time of a cap shows
what it costs to compute the function as written. Microseconds on the device: medians by
CUPTI for JAX, by CUDA's events for PyTorch. Errors are distances from the result of
``written``, else of ``flex``, relative to its norm: the largest of all results, of one
batch entry.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from tests.bench import choices, in_turns, record, scored_flex
from tests.bench.choices import BF16, F32, Row
from tests.bench.scored_functions import FUNCTIONS, HEADS, Function

MODULE = "tests.bench.scored_gpu"
SETS, TURNS = 2, 7
PASSES = "forward", "both"


def program(function: Function, width: int) -> Callable[..., Any]:
    """Returns attention by one function, as models write it."""

    def attend(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=F32)
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        x = function.of(x * width**-0.5, i, j, *arrays)
        if function.sees is not None:
            x = jnp.where(function.sees(i, j, *arrays), x, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, -1).astype(BF16), v)

    return attend


def row_of(name: str, b: int, t: int, width: int) -> Row:
    """Returns a row of `choices`."""
    function = FUNCTIONS[name]
    drawn = function.arrays(np.random.default_rng(0), b, t)
    shapes = (((b, t, HEADS, width), BF16),) * 3
    return Row(
        f"{name}, {b}x{t}x{HEADS}x{width}", function.op, program(function, width),
        (*shapes, *((x.shape, x.dtype) for x in drawn)), (),
    )  # fmt: skip


def of_pass(row: Row, passes: str, learned: bool, inside: bool = False) -> Row:
    """Returns the row, or one that returns gradients of q, k and v too.

    Args:
        row: The row.
        passes: ``forward`` or ``both``.
        learned: Whether the gradient of what the function reads is returned too.
        inside: Whether the forward is rewritten here already.
    """
    row = replace(row, fn=rewriter.optimize(row.fn)) if inside else row
    if passes == "forward":
        return row

    def both(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *arrays, up = more
        moving = (q, k, v, *(arrays if learned else ()))
        still = () if learned else arrays
        out, back = jax.vjp(lambda *x: row.fn(*x, *still), *moving)
        return out, *back(up)

    return replace(row, fn=both, shapes=(*row.shapes, row.shapes[0]))


def operands(row: Row, function: Function, seed: int) -> tuple[Any, ...]:
    """Returns a row's arguments."""
    (shape, dtype), b, t = row.shapes[0], *row.shapes[0][0][:2]
    normal = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(jax.random.key(seed), 4)
    arrays = function.arrays(np.random.default_rng(seed), b, t)
    *qkv, up = map(normal, keys)
    both = len(row.shapes) > 3 + len(arrays)
    return (*qkv, *map(jax.device_put, arrays), *([up] if both else []))


def compiled(row: Row, passes: str, by: str) -> Any:
    """Returns a compiled arm and its kernels, or why there is none."""
    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)
    try:
        if by in ("written", "inside"):
            return jax.jit(row.fn).lower(*shapes).compile(), ()
        if by != "chosen":
            forced = rewriter.optimize(row.fn, implementation={row.op: by})
            sites = forced.report(*shapes).sites
            if not any(by in str(site.kernel) for site in sites):
                return "it does not take the function"
        return choices.compiled(row, passes, by, shapes)
    except Exception as problem:
        return (str(problem).strip() or repr(problem)).splitlines()[0][:200]


def flex_of(function: Function, row: Row) -> dict[str, Any]:
    """Returns FlexAttention's steps, each of which ran once, or why there are none."""
    try:
        steps = scored_flex.prepared(function, operands(row, function, 0))
        steps["both"]()
        return dict(steps)
    except Exception as problem:
        return dict.fromkeys(PASSES, repr(problem)[:300])


def measured(
    row: Row, passes: str, function: Function, arms: dict[str, Any]
) -> dict[str, Any]:
    """Returns a row's figures: microseconds by arm, errors, and what was chosen."""
    made: dict[str, Any] = {"row": row.name, "pass": passes, "us": {}, "failed": {}}
    sets = [operands(row, function, seed) for seed in range(SETS)]
    results, programs = {}, {}
    for by, arm in arms.items():
        if isinstance(arm, str):
            made["failed"][by] = arm
        elif by == "flex":
            results[by] = scored_flex.results(arm)
            made["us"][by] = round(scored_flex.microseconds(arm), 1)
        else:
            programs[by], kernels = arm
            some = jax.tree.leaves(programs[by](*sets[0]))
            some = (x[:1] if x.ndim == 4 else x for x in some)
            results[by] = [np.asarray(x, F32) for x in some]
            if by == "chosen":
                made["chosen"] = kernels
    times = timing.measure(list(programs.values()), sets, TURNS)
    for by, samples in zip(programs, times, strict=True):
        made["us"][by] = round(1e6 * samples.median, 1)
    made["kernels"] = {b: len(x.kernels) for b, x in zip(programs, times, strict=True)}
    exact = next((x for x in ("written", "flex") if x in results), None)
    if exact:
        want = results.pop(exact)
        apart = {by: max(map(choices.apart, x, want)) for by, x in results.items()}
        made[f"apart from {exact}"] = apart
    return made


def measure_all(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Measures the functions and widths of some names."""
    part = os.environ[in_turns.PART].split("/")[0]
    folder = f"{os.environ[in_turns.FOLDER]}/inductor-{part}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # processes must not share one
    todo, made = [], []
    with ThreadPoolExecutor(2) as pool:
        for name in names:
            label, width = name.rsplit(", ", 1)
            row = row_of(label, given.batch, given.tokens, int(width))
            function = FUNCTIONS[label]
            for passes in PASSES:
                one = of_pass(row, passes, function.learned)
                todo.append((name, function, one, passes))
                within = of_pass(row, passes, function.learned, inside=True)
                arms = [by for by in given.arms.split(",") if by != "flex"]
                of = {by: within if by == "inside" else one for by in arms}
                made.append(
                    {by: pool.submit(compiled, of[by], passes, by) for by in arms}
                )
            if "flex" in given.arms:
                steps = flex_of(function, one)
                for passes, arms in zip(PASSES, made[-2:], strict=True):
                    arms["flex"] = done(steps[passes])
        wait([x for arms in made for x in arms.values()])
    rows = []
    with in_turns.turn():
        for (name, function, row, passes), arms in zip(todo, made, strict=True):
            found = measured(
                row, passes, function, {b: x.result() for b, x in arms.items()}
            )
            print(json.dumps(found, default=str), flush=True)
            rows.append({"model": name, **found})
            in_turns.write(given.json, rows)


def done(value: Any) -> Future[Any]:
    """Returns a future that has its result."""
    made: Future[Any] = Future()
    made.set_result(value)
    return made


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = in_turns.parser(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--arms", default="chosen,written,cudnn,flex")
    given = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    widths = given.widths.split(",")
    names = [f"{name}, {width}" for name in FUNCTIONS for width in widths]
    rows = in_turns.rows_of(MODULE, names, given, measure_all)
    if rows is not None and given.json:
        told = f"--arms {given.arms}" + (f' --only "{given.only}"' * bool(given.only))
        rows = [{k: x for k, x in row.items() if k != "model"} for row in rows]
        record.write(given.json, f"python3 -m {MODULE} {told}", rows=rows)


if __name__ == "__main__":
    main()
