"""Attention of one query for each sequence on a Hopper GPU: ours, cuDNN's, XLA's.

  python3 -m tests.bench.hopper_decode [--configs] [--cases "A;B"] [--json PATH]

Microseconds are the device's by CUPTI, all kernels of a run added up. They are medians
of runs that take turns on three sets of normal bfloat16 operands. Compiling and first
runs are left out. All programs take lengths of sequences at run time: full ones, and
ones drawn from 1 to all keys. Where sequences are padded on the left, they take a mask
of keys instead, which says the same of their ends. TB/s count the keys and values
before those lengths, each once, and all of them under a mask. Pages are in no order,
and the table names each once. Errors are relative ones of two sequences' results
against float64. Without --configs ours runs with four configs, and on pages with one.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.kernels.attention.reference import reference, usual
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.bench import record

COMMAND = "python3 -m tests.bench.hopper_decode"
HEADS, WIDTH = 32, 128
CASES: dict[str, tuple[int, int, int]] = {
    "32 MiB": (8, 2048, 4),
    "64 MiB": (8, 4096, 4),
    "256 MiB, 8 sequences": (8, 8192, 8),
    "1 GiB, 8 sequences": (8, 32768, 8),
    "1 GiB, 64 sequences": (64, 4096, 8),
    "1 GiB, 128 sequences": (128, 4096, 4),
    "256 MiB, 8 sequences, padded": (8, 8192, 8),
}
"""Sequences, keys and key heads, by name."""

PADDED = ("256 MiB, 8 sequences, padded",)
"""Those with a mask in place of lengths."""

PAGES = (16, 64)
"""Keys of a page."""

SCALE = WIDTH**-0.5
SETS, TURNS, WITHOUT = 3, 20, {"contiguous": 4, "paged": 1}


@functools.partial(jax.jit, static_argnums=(1,))
def operands(key: Any, case: tuple[int, int, int]) -> dict[str, jax.Array]:
    """Returns normal q, k and v, and pages of both sizes with the same keys."""
    b, s, heads = case
    keys = jax.random.split(key, 4)
    normal = lambda i, shape: jax.random.normal(keys[i], shape, jnp.bfloat16)
    made = {"q": normal(0, (b, 1, HEADS, WIDTH))}
    made |= {x: normal(i + 1, (b, s, heads, WIDTH)) for i, x in enumerate("kv")}
    for size in PAGES:
        count = b * s // size
        place = jax.random.permutation(keys[3], count).astype(jnp.int32)
        made[f"table{size}"] = place.reshape(b, s // size)
        for x in "kv":
            pages = made[x].reshape(count, size, heads, WIDTH)
            made[f"{x}{size}"] = jnp.zeros_like(pages).at[place].set(pages)
    return made


def lengths_of(case: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Returns lengths of sequences by the name of how they are chosen: int32 [b]."""
    b, s, _ = case
    drawn = np.random.default_rng(0).integers(1, s + 1, b)
    return {"full": np.full(b, s, np.int32), "drawn": drawn.astype(np.int32)}


def hiding(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns a case's lengths, or its mask, as an operand by the name of the kind."""
    by_kind = lengths_of(CASES[name])
    if name not in PADDED:
        return {kind: {"kv_lengths": n} for kind, n in by_kind.items()}
    at = np.arange(CASES[name][1])
    masks = {kind: at >= len(at) - n[:, None] for kind, n in by_kind.items()}
    return {kind: {"mask": x[:, None, None]} for kind, x in masks.items()}


Program = Callable[[dict[str, jax.Array], dict[str, jax.Array]], jax.Array]


def candidates(
    shapes: Mapping[str, Any], hidden: Mapping[str, Any], every: bool
) -> dict[str, Program]:
    """Returns functions of operands, and of lengths or a mask, by name.

    Args:
        shapes: What `operands` gives.
        hidden: What `hiding` gives of a kind.
        every: Whether to take every config.
    """
    params = {"scale": SCALE}
    on, of = device.attached(), registry()

    def configs(op: str, given: dict[str, Any]) -> Any:
        kind = "paged" if op == "paged_attention" else "contiguous"
        spec = spec_of(of.op(op), {**given, **hidden}, params)
        space = of.kernel(op, "hopper_decode").space
        return worth_measuring(space, spec, on, 24 if every else WITHOUT[kind])[0]

    made: dict[str, Program] = {
        "xla": lambda x, n: usual(x["q"], x["k"], x["v"], **n, **params),
        "cudnn": lambda x, n: jax.nn.dot_product_attention(
            x["q"], x["k"], x["v"], scale=SCALE, implementation="cudnn", **cudnn(n)
        ),
    }
    ours = of.kernel("attention", "hopper_decode").forward
    for config in configs("attention", {n: shapes[n] for n in "qkv"}):
        made[str(config)] = lambda x, n, config=config: ours(
            q=x["q"], k=x["k"], v=x["v"], **n, config=config, **params
        )
    if "mask" in hidden:
        return made
    paged = of.kernel("paged_attention", "hopper_decode").forward
    for size in PAGES:
        names = {"q": "q", "k_pages": f"k{size}", "v_pages": f"v{size}",
                 "table": f"table{size}"}  # fmt: skip
        given = {name: shapes[x] for name, x in names.items()}
        for config in configs("paged_attention", given):

            def run(x: Any, n: Any, config: Any = config, names: Any = names) -> Any:
                own = {name: x[y] for name, y in names.items()}
                return paged(**own, **n, config=config, **params)

            made[f"pages of {size}, {config}"] = run
    return made


def cudnn(hidden: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns lengths or a mask as `jax.nn.dot_product_attention` takes them."""
    if "mask" in hidden:
        return dict(hidden)
    n = hidden["kv_lengths"]
    return {"key_value_seq_lengths": n, "query_seq_lengths": jnp.ones_like(n)}


def compiled(run: Program, *given: Any) -> Any:
    """Returns the compiled program, or why there is none."""
    try:
        program = jax.jit(run).lower(*given).compile()
        jax.block_until_ready(program(*given))
        return program
    except Exception as problem:
        return str(problem).splitlines()[0][:120]


SAMPLE = [0, -1]
"""Sequences whose results are checked."""


def exact(x: Mapping[str, jax.Array], hidden: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the sample's result in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (np.asarray(x[n][np.array(SAMPLE)], np.float64) for n in "qkv")
        own = {name: n[SAMPLE] for name, n in hidden.items()}
        return np.asarray(reference(q, k, v, **own, scale=SCALE))


def measured(name: str, every: bool) -> list[dict[str, Any]]:
    """Returns a row for each candidate of a case and kind of lengths."""
    case = CASES[name]
    b, s, heads = case
    sets = [operands(jax.random.key(i), case) for i in range(SETS)]
    by_kind = hiding(name)
    first = jax.tree.map(jnp.asarray, by_kind["full"])
    made = candidates(sets[0], first, every)
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda f: compiled(f, sets[0], first), made.values()))
    programs = dict(zip(made, programs, strict=True))
    rows = [
        {"case": name, "by": by, "failed": problem}
        for by, problem in programs.items()
        if isinstance(problem, str)
    ]
    able = {by: p for by, p in programs.items() if not isinstance(p, str)}
    for kind, hidden in by_kind.items():
        keys = int(hidden["kv_lengths"].sum()) if name not in PADDED else b * s
        nbytes = 4 * keys * heads * WIDTH
        inputs = [(x, jax.tree.map(jnp.asarray, hidden)) for x in sets]
        times = timing.measure(list(able.values()), inputs, TURNS)
        want = exact(sets[0], hidden)
        for (by, program), t in zip(able.items(), times, strict=True):
            got = np.asarray(program(*inputs[0])[np.array(SAMPLE)], np.float64)
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            rows.append({
                "case": name, "lengths": kind, "by": by,
                "us": round(t.median * 1e6, 1),
                "sigma_percent": round(100 * t.sigma / t.median, 1),
                "tb_per_s": round(nbytes / t.median / 1e12, 3),
                "error": float(f"{error:.1e}"), "method": t.method,
                "kernels": sorted(set(t.kernels)),
            })  # fmt: skip
    return rows


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        for row in measured(name, given.configs):
            shown = [v for k, v in row.items() if k not in ("method", "kernels")]
            print(*shown, sep="   ", flush=True)
            rows.append(row)
    if given.json:
        record.write(
            given.json, COMMAND + (" --configs" if given.configs else ""),
            cases=CASES, padded=PADDED, page_sizes=PAGES, results=rows,
        )  # fmt: skip


if __name__ == "__main__":
    main()
