"""Rewritten programs move no large arrays that they did not move before, in any shape.

Each kind is an op with a kernel for Hopper GPUs, as programs write it. 40 shapes of it
are drawn. Nothing is timed or run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import slow
from tests.bench import packed_dot
from tests.kernels.test_moved import (
    attention,
    experts,
    layer,
    narrow,
    of_pass,
    rms,
    swiglu,
)
from tests.support.kernels import moved

BF16, F32, I32, I8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
SHAPES = 40
Draws = np.random.Generator
Specs = tuple[jax.ShapeDtypeStruct, ...]
BOTH, FORWARD = ("forward", "both"), ("forward",)


@dataclass(frozen=True)
class Kind:
    """An op in a program.

    Attributes:
        op: The op.
        fn: The program.
        drawn: Draws the shapes of its arguments.
        passes: What is compiled: the result alone, and with gradients.
        kernel: The kernel.
    """

    op: str
    fn: Callable[..., Any]
    drawn: Callable[[Draws], Specs]
    passes: tuple[str, ...] = BOTH
    kernel: str = "hopper"


def spec(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --------------------------------------------------------------- attention
def heads(draws: Draws, least: int, most: int, size: int = 1 << 21) -> Specs:
    """q, k and v of one shape, of `size` numbers or more."""
    t, h = int(draws.integers(least, most)), int(draws.choice([32, 64, 80, 96, 128]))
    n = int(draws.choice([4, 6, 12, 16]))
    return (spec(-(-size // (t * n * h)), t, n, h),) * 3


def short(draws: Draws) -> Specs:
    """Windows of up to 64 positions, in heads of up to 64, and a bias of each head."""
    t, n = int(draws.integers(17, 65)), int(draws.choice([3, 4, 6, 12]))
    b, h = int(draws.integers(900, 2000)), int(draws.choice([16, 32, 64]))
    return (*(spec(b, t, n, h),) * 3, spec(n, t, t))


def with_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(x.astype(F32)).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def capped(q: Any, k: Any, v: Any) -> Any:
    """Scores with a part for the distance of positions."""
    x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=F32)
    away = jnp.arange(x.shape[-1]) - jnp.arange(x.shape[-2])[:, None]
    x = 20 * jnp.tanh(x / 20) * jnp.exp(-0.01 * jnp.abs(away))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x).astype(v.dtype), v)


def one_query(draws: Draws) -> Specs:
    """A query of each sequence, and a cache of 8 bits with scales and lengths."""
    b, s = int(draws.integers(2, 16)), int(128 * draws.integers(16, 64))
    k, group, h = int(draws.choice([2, 4, 8])), int(draws.choice([1, 4, 8])), 128
    cache, scale = spec(b, s, k, h, dtype=I8), spec(b, s, k, 1, dtype=F32)
    return spec(b, k, group, h), cache, cache, scale, scale, spec(b, dtype=I32)


def from_cache(q: Any, k: Any, v: Any, ks: Any, vs: Any, lengths: Any) -> Any:
    by_key = lambda x: x[..., 0].swapaxes(1, 2)[:, :, None]
    x = jnp.einsum("bkgh,bskh->bkgs", q, k.astype(q.dtype)).astype(F32)
    x = x * q.shape[-1] ** -0.5 * by_key(ks)
    seen = jnp.arange(k.shape[1]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, x, -1e30)) * by_key(vs)
    return jnp.einsum("bkgs,bskh->bkgh", weights.astype(q.dtype), v.astype(q.dtype))


def latents(draws: Draws) -> Specs:
    """A query of each of 128 heads, and a cache of latents and rotary keys."""
    b, s = int(draws.integers(2, 32)), int(64 * draws.integers(16, 64))
    made = spec(b, 1, 128, 512), spec(b, 1, 128, 64), spec(b, s, 512), spec(b, s, 64)
    return (*made, spec(b, dtype=I32))


def of_latents(q: Any, q_rope: Any, latent: Any, k_rope: Any, lengths: Any) -> Any:
    x = jnp.einsum("bthc,bsc->bhts", q, latent)
    x += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    seen = jnp.arange(x.shape[-1]) < lengths[:, None, None, None]
    x = jnp.where(seen, x.astype(F32) * 192**-0.5, -jnp.inf)
    weights = jax.nn.softmax(x).astype(BF16)
    return jnp.einsum("bhts,bsc->bthc", weights, latent)


# ------------------------------------------------------------------- norms
def rows(draws: Draws, columns: list[int], beside: int) -> Specs:
    """Rows of some columns, and `beside` vectors of them."""
    d = int(draws.choice(columns))
    batch = int(draws.integers(2, 9))
    x = spec(batch, (4 << 20) // d // batch + int(draws.integers(0, 99)), d)
    return (x, *(spec(d, dtype=F32),) * beside)


WIDE, NARROW = [512, 768, 1024, 1280, 2048, 4096], [64, 96, 128, 192, 256]
ODD = [320, 576, 960, 1600, 2880]


def of_sum(x: Any, added: Any, scale: Any) -> Any:
    """A residual stream: the sum and its norm."""
    total = x + added
    return total, rms(total, scale)


def sums(draws: Draws) -> Specs:
    x, scale = rows(draws, WIDE, 1)
    return x, x, scale


def images(draws: Draws) -> Specs:
    """Images of channels in 32 groups, and a scale and a bias of each channel."""
    side, c = int(2 * draws.integers(8, 33)), int(32 * draws.choice([4, 8, 10, 20]))
    b = max(1, (4 << 20) // (side * side * c))
    return spec(b, side, side, c), spec(c, dtype=F32), spec(c, dtype=F32)


def group_norm(x: Any, scale: Any, bias: Any) -> Any:
    y = x.reshape(*x.shape[:-1], 32, -1).astype(F32)
    mean, square = y.mean((1, 2, 4)), jnp.square(y).mean((1, 2, 4))
    var = jnp.maximum(0.0, square - jnp.square(mean))
    each = x.shape[-1] // 32
    mean, var = (jnp.repeat(v, each, axis=-1)[:, None, None] for v in (mean, var))
    return ((x - mean) * (jax.lax.rsqrt(var + 1e-6) * scale) + bias).astype(x.dtype)


# ---------------------------------------------------------------- products
def sizes(draws: Draws, least: int, most: int) -> tuple[int, int, int]:
    """Rows, and numbers of both axes of a matrix, in multiples of 128."""
    m = int(draws.integers(least, most))
    k, n = (int(128 * draws.integers(8, 24)) for _ in range(2))
    return m, k, n


def eight_bits(draws: Draws) -> Specs:
    m, k, n = sizes(draws, 1024, 4096)
    m -= m % 8
    scales = spec(m, dtype=F32), spec(1, n, dtype=F32)
    return spec(m, k, dtype=I8), spec(n, k, dtype=I8), *scales


def of_eight_bits(x: Any, w: Any, of_rows: Any, of_columns: Any) -> Any:
    dims = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(x, w, dims, preferred_element_type=I32).astype(F32)
    return (y * of_columns * of_rows[:, None]).astype(BF16)


def stored(draws: Draws, few: bool) -> Specs:
    m, k, n = sizes(draws, 1, 65) if few else sizes(draws, 512, 4096)
    return spec(m, k), spec(k, n, dtype=I8), spec(n)


def of_stored(x: Any, w: Any, scale: Any) -> Any:
    return x @ (w.astype(x.dtype) * scale)


def stored_unit(draws: Draws) -> Specs:
    m, k, n = sizes(draws, 512, 4096)
    matrix, scale = spec(k, n, dtype=I8), spec(n)
    return spec(m, k), matrix, matrix, scale, scale


def of_stored_unit(x: Any, gate: Any, up: Any, of_gate: Any, of_up: Any) -> Any:
    return jax.nn.silu(of_stored(x, gate, of_gate)) * of_stored(x, up, of_up)


def unit(draws: Draws) -> Specs:
    m, k, n = sizes(draws, 1024, 4096)
    return spec(m, k), spec(k, n), spec(k, n)


def groups(draws: Draws) -> Specs:
    m, k, n = sizes(draws, 1024, 8192)
    g = int(draws.choice([8, 16, 32]))
    return spec(m, k), spec(g, k, n), spec(g, dtype=I32)


def expert_units(draws: Draws) -> Specs:
    x, w, sizes = groups(draws)
    return x, w, w, sizes


def narrow_groups(draws: Draws) -> Specs:
    x, w, sizes = groups(draws)
    scale = spec(w.shape[0], w.shape[2], dtype=F32)
    return x, spec(*w.shape, dtype=I8), scale, sizes


def pages(draws: Draws) -> Specs:
    """A query of each sequence, and pages of keys in a pool."""
    b, p = int(draws.integers(2, 16)), int(draws.integers(16, 64))
    k, group, size = int(draws.choice([2, 4, 8])), int(draws.choice([1, 4])), 64
    pool = spec(b * p, size, k, 128)
    return spec(b, k, group, 128), pool, pool, spec(b, p, dtype=I32), spec(b, dtype=I32)


def of_pages(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    b = q.shape[0]
    k, v = (x[table].reshape(b, -1, *x.shape[2:]) for x in (k, v))
    x = jnp.einsum("bkgh,bskh->bkgs", q, k, preferred_element_type=F32) * 0.1
    seen = jnp.arange(k.shape[1]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, x, -1e30)).astype(v.dtype)
    return jnp.einsum("bkgs,bskh->bkgh", weights, v)


def words(draws: Draws) -> Specs:
    """A few rows, and a matrix of GPTQ's words with scales of 128 numbers."""
    m, k, n = sizes(draws, 1, 17)
    k = 2 * k
    scales = spec(k // 128, n, dtype=jnp.float16)
    made = spec(k // 8, n, dtype=I32), spec(k // 128, n // 8, dtype=I32), scales
    return spec(m, k, dtype=jnp.float16), *made


def of_words(x: Any, w: Any, zeros: Any, scales: Any) -> Any:
    return packed_dot.as_written("gptq", x, w, zeros, scales)


def few_rows_of_units(draws: Draws) -> Specs:
    x, *rest = stored_unit(draws)
    return spec(int(draws.integers(1, 65)), x.shape[1]), *rest


def blocks(draws: Draws) -> Specs:
    m, k, n = sizes(draws, 1024, 4096)
    m -= m % 8
    scales = spec(m, k // 128, dtype=F32), spec(k // 128, n // 128, dtype=F32)
    return spec(m, k, dtype=I8), spec(n, k, dtype=I8), *scales


def of_blocks(x: Any, w: Any, of_rows: Any, of_blocks: Any) -> Any:
    parts = x.shape[1] // 128
    y = jnp.einsum(
        "mzk,nzk->zmn", x.reshape(-1, parts, 128), w.reshape(-1, parts, 128),
        preferred_element_type=I32,
    ).astype(F32)  # fmt: skip
    y = y * of_rows.T[:, :, None] * jnp.repeat(of_blocks, 128, 1)[:, None]
    return y.sum(0).astype(BF16)


def vocabulary(draws: Draws) -> Specs:
    m, k, _ = sizes(draws, 512, 2048)
    return spec(m, k), spec(k, int(draws.integers(4000, 9000))), spec(m, dtype=I32)


def loss(x: Any, w: Any, labels: Any) -> Any:
    y = (x @ w).astype(F32)
    picked = jnp.take_along_axis(y, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(y, -1) - picked)


def lines(draws: Draws) -> Specs:
    v, d = int(draws.integers(1000, 4000)), int(128 * draws.integers(4, 12))
    return spec(v, d), spec(8, int(draws.integers(200, 600)), dtype=I32)


PLAIN = attention("btnh", "bsnh", "btnh")
CAUSAL = attention("btnh", "bsnh", "btnh", 1 << 20)
KINDS: dict[str, Kind] = {
    "attention": Kind("attention", PLAIN, lambda d: heads(d, 65, 1200)),
    "causal attention": Kind("attention", CAUSAL, lambda d: heads(d, 65, 1200)),
    "short attention": Kind("attention", with_bias, short),
    "function of scores": Kind("scored_attention", capped, lambda d: heads(d, 65, 600)),
    "cache of 8 bits": Kind("quantized_attention", from_cache, one_query, FORWARD),
    "latents": Kind("latent_attention", of_latents, latents, FORWARD, "hopper_latent"),
    "rms norm": Kind("rms_norm", rms, lambda d: rows(d, WIDE, 1)),
    "layer norm": Kind("layer_norm", layer, lambda d: rows(d, WIDE, 2)),
    "narrow norm": Kind("layer_norm", layer, lambda d: rows(d, NARROW, 2)),
    "odd norm": Kind("layer_norm", layer, lambda d: rows(d, ODD, 2)),
    "norm of a sum": Kind("rms_norm", of_sum, sums),
    "group norm": Kind("group_norm", group_norm, images),
    "unit": Kind("gated_linear_unit", swiglu, unit, FORWARD),
    "unit of int8": Kind(
        "quantized_gated_linear_unit", of_stored_unit, stored_unit, FORWARD
    ),
    "int8": Kind("quantized_dot", of_stored, lambda d: stored(d, False), FORWARD),
    "int8, few rows": Kind(
        "quantized_dot", of_stored, lambda d: stored(d, True), FORWARD,
        "hopper_few_rows",
    ),
    "int8 x int8": Kind(
        "quantized_dot", of_eight_bits, eight_bits, FORWARD, "hopper_eight_bits"
    ),
    "blocks": Kind("block_scaled_dot", of_blocks, blocks, FORWARD),
    "unit of int8, few rows": Kind(
        "quantized_gated_linear_unit", of_stored_unit, few_rows_of_units, FORWARD,
        "hopper_few_rows",
    ),
    "words": Kind("packed_dot", of_words, words, FORWARD, "hopper_few_rows"),
    "pages": Kind("paged_attention", of_pages, pages, FORWARD, "hopper_decode"),
    "ragged unit": Kind("ragged_gated_linear_unit", experts, expert_units, FORWARD),
    "ragged int8": Kind("quantized_ragged_dot", narrow, narrow_groups, FORWARD),
    "ragged": Kind("ragged_dot", jax.lax.ragged_dot, groups),
    "vocabulary": Kind("linear_cross_entropy", loss, vocabulary),
    "embedding": Kind(
        "embedding", lambda table, ids: table[ids], lines, ("both",), "in_float32"
    ),
}  # fmt: skip
LEFT = {
    # Products with a matrix of whole tiles: XLA for GPUs pads it likewise.
    "vocabulary": r"(pad|slice) \[\d+,\d+\]",
    # The rows of a gradient are put in the table's order: that is how they are summed.
    "embedding": r"gather \[\d+,1,\d+\]",
    # The maximum of each row is found anew, with a part of the values beside it.
    "function of scores": r"slice \[\d+,\d+,\d+,16\]",
}
"""Moves that are left, each once."""
QUICK = frozenset({("short attention", "both", 0), ("group norm", "both", 0)})


def drawn(kind: str, number: int) -> Specs:
    """The shapes of a case, the same in every run."""
    return KINDS[kind].drawn(np.random.default_rng([number, len(kind)]))


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "passes", "number"),
    slow.unless(
        lambda *case: case in QUICK,
        [(k, p, i) for k in KINDS for p in KINDS[k].passes for i in range(SHAPES)],
        several=True,
    ),
)
def test_nothing_large_is_moved_that_was_not(
    kind: str, passes: str, number: int
) -> None:
    case, specs = KINDS[kind], drawn(kind, number)
    run = of_pass(case.fn, specs, passes)
    before = moved.moves(run, *specs)
    with moved.opaque_kernels():
        around = moved.around_kernels(run, {case.op: case.kernel}, *specs)
        found = moved.moves(around, *specs)
    more = Counter(found) - Counter(before)
    known = re.compile(LEFT.get(kind, "none"))
    assert not [m for m, count in more.items() if count > 1 or not known.match(m)]
