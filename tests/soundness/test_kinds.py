"""Programs whose masks, operands and guards must stay what the machine makes of them.

Each kind of program is one that a law of real or ideal whole numbers would change. The
original and the rewritten program, kernels forced, agree in every entry: values within
rounding, numbers where there are numbers, NaN where there is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

pytestmark = pytest.mark.once

T, N, H = 48, 2, 8
FORCED = {
    "attention": ["memory_bounded", "xla"],
    "rms_norm": ["memory_bounded", "xla"],
    "layer_norm": ["memory_bounded", "xla"],
    "gated_linear_unit": ["memory_bounded", "xla"],
}
Program = Callable[..., Any]


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    draw = np.random.default_rng(seed).normal(size=shape) * scale
    return draw.astype("float32")


Q, K, V = (normal(i, 1, T, N, H) for i in range(3))
AT = jnp.arange(T)
POSITIONS = AT.astype(jnp.float32)
TIMES = np.arange(T, dtype="float32")


def attend(scores: Any, v: Any) -> Any:
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def dots(q: Any, k: Any) -> Any:
    return jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5


def masked(mask: Any, fill: float = -1e9) -> Any:
    return attend(jnp.where(mask, dots(Q, K), fill), V)


def pairs(f: Program) -> Program:
    """Attention under a mask of pairs: f of what is given, at queries and keys."""
    return lambda *given: masked(f(*(x[:, None] for x in given), *given))


# ------------------------------------------------------------------ masks
BITS = np.random.default_rng(5).integers(0, 2**32, (T, T), dtype="uint32")
NEAR_INFINITY = np.where(np.arange(T) < T - 8, TIMES, np.inf).astype("float32")
HALF_STEPS = (TIMES * np.float32(0.02)).astype("float32")
FLOATS = {
    "scaled": (lambda t, s: masked((t * s)[:, None] >= (t * s)[None]), TIMES, 0.02),
    "difference": (lambda t: masked(t[:, None] - t[None] >= 0), HALF_STEPS),
    "inf ge": (pairs(lambda a, b: a >= b), NEAR_INFINITY),
    "inf not lt": (pairs(lambda a, b: ~(a < b)), NEAR_INFINITY),
    "inf minus": (pairs(lambda a, b: a - b >= 0), NEAR_INFINITY),
    "nan ge": (pairs(lambda a, b: a >= b), np.where(TIMES == 3, np.nan, TIMES)),
    "nan not lt": (pairs(lambda a, b: ~(a < b)), np.where(TIMES == 3, np.nan, TIMES)),
    "sum": (pairs(lambda a, b: a + 1e8 >= b + 1e8), TIMES),
    "shifted": (pairs(lambda a, b: (a - b < 0.06) & (a >= b)), HALF_STEPS),
    "ratio": (pairs(lambda a, b: a / (b + 1) >= 1), HALF_STEPS),
    "squares": (pairs(lambda a, b: a * a >= b * b), normal(7, T) * 1e20),
    "tiny": (pairs(lambda a, b: a * 1e-30 >= b * 1e-30), HALF_STEPS * 1e-10),
    "abs": (pairs(lambda a, b: abs(a - b) < 1e-7), normal(8, T) * 1e-7),
    "min": (pairs(lambda a, b: jnp.minimum(a, 1.0) >= b), normal(9, T)),
    "select": (pairs(lambda a, b: jnp.where(a > 0, a, 0 * a) >= b), NEAR_INFINITY - 9),
    "near a position": (lambda: masked(POSITIONS[:, None] + 2.999999 >= POSITIONS),),
    "times nearly one": (lambda: masked(POSITIONS[:, None] * 1.0000001 >= POSITIONS),),
    "or": (lambda t: masked((t[:, None] > t) | (AT[:, None] == AT)), NEAR_INFINITY),
}
NOT_ALL_NUMBERS = np.where(TIMES == 3, np.inf, np.where(TIMES == 7, np.nan, TIMES))
CANCELLED = {
    "less itself": lambda g: g - g == 0,
    "times zero": lambda g: g * 0 == 0,
    "over itself": lambda g: g / g == 1,
    "and its opposite": lambda g: g + (-g) == 0,
    "equal to itself": lambda g: g == g,
    "at least itself": lambda g: g >= g,
    "twice": lambda g: 2 * g <= g + g,
    "square": lambda g: g * g >= 0,
    "below inf": lambda g: jnp.minimum(g, jnp.inf) <= jnp.inf,
    "chosen zero": lambda g: jnp.where(g > 0, 0 * g, 0.0) == 0,
    "pairs": lambda g: (g[:, None] - g) - (g[:, None] - g) == 0,
    "either way": lambda g: (g[:, None] >= g) | (g[:, None] < g),
    "sum": lambda g: (g - g).cumsum() == 0,
}
"""True of all numbers, and not of NaN, or not of infinities."""
LOW_PRECISION = {
    f"{dtype.__name__} {name}": (f, np.arange(600 - T, 600).astype(dtype))
    for dtype in (jnp.bfloat16, jnp.float16)
    for name, f in {
        "causal": pairs(lambda a, b: a >= b),
        "window": pairs(lambda a, b: (a >= b) & (a - b < 8)),
        "equal": pairs(lambda a, b: a == b),
        "strict": pairs(lambda a, b: (a > b) | (b < 556)),
    }.items()
} | {
    "made": (lambda: masked(_made(jnp.bfloat16)[:, None] >= _made(jnp.bfloat16)),),
    "cast": (lambda: masked(_cast(jnp.bfloat16)[:, None] >= _cast(jnp.bfloat16)),),
    "half": (lambda: masked((AT / 2).astype(jnp.bfloat16)[:, None] >= AT / 2),),
}


def _made(dtype: Any) -> Any:
    return lax.iota(dtype, 300 + T)[300:]


def _cast(dtype: Any) -> Any:
    return (jnp.arange(T) + 500).astype(dtype)


DISTANCE = (AT[:, None] - AT).astype("float32")
THRESHOLDS = {
    f"{name} {c!r}": (lambda c, test=test: masked(test(DISTANCE, c)), np.float32(c))
    if given
    else (lambda c=c, test=test: masked(test(DISTANCE, jnp.float32(c))),)
    for c in (2.999999, 3.0000002, -0.0000001, 0.9999999, 5.5)
    for given in (False, True)
    for name, test in {
        f"le{' given' * given}": lambda d, c: (d >= 0) & (d <= c),
        f"lt{' given' * given}": lambda d, c: (d >= 0) & (d < c),
        f"eq{' given' * given}": lambda d, c: (d == c) | (d == 0),
    }.items()
}
THRESHOLDS |= {
    f"{name} {c!r}": (
        lambda c=c, bound=bound: masked(
            bound(POSITIONS, jnp.float32(c))[:, None] <= AT
        ),
    )
    for c in (2.9999998, 3.0000002)
    for name, bound in {
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "clip": lambda p, c: jnp.clip(p, c, 8),
        "where": lambda p, c: jnp.where(p > 4, p, c),
        "maximum of a minimum": lambda p, c: jnp.maximum(jnp.minimum(p, c), 1),
        "shifted maximum": lambda p, c: jnp.maximum(p - 2, c) + 1,
    }.items()
}
U8, I8, U16, U32, I32 = (np.dtype(x).type for x in ("u1", "i1", "u2", "u4", "i4"))
MOST = np.int32(2**31 - 1)
INTEGERS = {
    "bits": (lambda r: masked((r > U32(10**9)) | (AT[:, None] == AT)), BITS),
    "bits of int": (lambda r: masked((r.astype("int32") > 0) | (AT == 0)), BITS),
    "uint length": (lambda n: masked(AT.astype("uint32") < n - U32(1)), U32(0)),
    "uint window": (pairs(lambda a, b: a - b < 8), AT.astype("uint32")),
    "uint8 wraps": (pairs(lambda a, b: a + U8(240) >= b), AT.astype("uint8")),
    "int8 sum": (pairs(lambda a, b: a + b >= 0), (3 * AT).astype("int8")),
    "int8 product": (lambda: masked((I8(100) * jnp.int8(5) <= AT) & (AT < 30)),),
    "uint16 square": (lambda: masked(jnp.uint16(65534) ** 2 + 6 > AT),),
    "saturates": (
        lambda t: masked(t.astype("uint8")[:, None] >= t.astype("uint8")),
        normal(6, T) * 100,
    ),
    "truncates": (
        lambda t: masked(t.astype("int32")[:, None] >= t.astype("int32")),
        normal(6, T) * 3,
    ),
    "narrows": (pairs(lambda a, b: a.astype("int8") >= b), AT * 9),
    "offset at the end": (lambda n: masked(AT[:, None] + n >= AT), MOST - 20),
    "offset at the start": (lambda n: masked(AT[:, None] + n <= AT), -MOST + 3),
    "less than the least": (lambda n: masked(n - 5 > AT), -MOST + 2),
    "more than the most": (lambda n: masked(n + 1 > AT), MOST),
    "negated": (lambda n: masked(-n > AT), -MOST - 1),
    "absolute": (lambda n: masked(jnp.abs(n) > AT), -MOST - 1),
    "segments": (pairs(lambda a, b: a == b), BITS[0] // U32(2**30)),
    "segments that wrap": (pairs(lambda a, b: a * I32(2**30) == b * 4), np.arange(T)),
    "shifted bits": (pairs(lambda a, b: (a >> 1) == (b >> 1)), np.arange(T) - 9),
    "times": (pairs(lambda a, b: a * 2**26 >= b * 2**26), np.arange(T, dtype="int32")),
}
FOLDED = {
    "div": (
        lambda: masked(AT[:, None] - AT < lax.div(jnp.int32(7), jnp.int32(2)) * 2),
    ),
    "div negative": (
        lambda: masked(
            (lax.div(jnp.int32(-1), jnp.int32(3)) >= AT[:, None]) | (AT < 2)
        ),
    ),
    "rem": (lambda: masked(lax.rem(jnp.int32(-7), jnp.int32(3)) + 5 <= AT),),
    "floor": (lambda: masked((jnp.int32(-7) // 3) + 9 <= AT),),
    "mod": (lambda: masked(jnp.int32(-7) % 3 + 4 <= AT),),
    "div of positions": (lambda: masked(lax.div(AT - 9, jnp.int32(4))[:, None] == 0),),
    "rem of positions": (lambda: masked(lax.rem(AT - 9, jnp.int32(4))[:, None] >= 0),),
    "int8 square": (lambda: masked(jnp.int8(100) * jnp.int8(100) <= AT),),
    "uint minus": (
        lambda: masked(AT.astype("uint32") < jnp.uint32(3) - jnp.uint32(5)),
    ),
    "float cast": (lambda: masked(jnp.float32(3.9).astype("int32") > AT),),
    "bfloat16 sum": (lambda: masked(jnp.bfloat16(257) + jnp.bfloat16(1) - 240 > AT),),
    "float16 product": (lambda: masked(jnp.float16(300) * jnp.float16(300) > AT),),
    "root": (lambda: masked(jnp.sqrt(jnp.float32(2)) ** 2 > DISTANCE),),
}

FEW = np.random.default_rng(1).integers(0, 3, T).astype("int32")
WIDE = normal(5, T, 3, scale=60)


def hot(s: Any, dtype: Any = "float32") -> Any:
    return jax.nn.one_hot(s, 3, dtype=dtype)


def gram(x: Any) -> Any:
    return x @ x.T


CONTRACTED = {
    "same class": (lambda s: masked(gram(hot(s)) > 0), FEW),
    "not another": (lambda s: masked(gram(hot(s)) != 0), FEW),
    "not none": (lambda s: masked(~(gram(hot(s)) <= 0)), FEW),
    "bfloat16": (lambda s: masked(gram(hot(s, "bfloat16")) > 0), FEW),
    "no class": (lambda s: masked(gram(hot(s - 1)) > 0), FEW),
    "whole numbers": (lambda s: masked(gram(hot(s, "int32")) > 0), FEW),
    "as booleans": (lambda s: masked(gram(hot(s)).astype(bool)), FEW),
    "at least one": (lambda s: masked(gram(hot(s)) >= 1), FEW),
    "a class of each": (lambda s: masked(hot(s - 1) @ jnp.ones((3, T)) > 0), FEW),
    "weighted": (
        lambda s: masked(
            jnp.einsum("tc,sc,c->ts", hot(s - 1), hot(s), jnp.exp(jnp.arange(3.0))) > 0
        ),
        FEW,
    ),
    "chosen exponentials": (
        lambda s: masked(gram(jnp.where(hot(s) > 0, jnp.exp(s[:, None]), 0.0)) > 0),
        FEW,
    ),
    "exponentials": (lambda z: masked(jnp.exp(z) @ jnp.exp(-z).T > 0), WIDE),
    "that vanish": (lambda z: masked(gram(jnp.exp(-2 * abs(z))) > 0), WIDE),
    "sigmoids": (lambda z: masked(gram(jax.nn.sigmoid(4 * z)) > 0), WIDE),
    "of softmax": (lambda z: masked(gram(jax.nn.softmax(z)) > 0), WIDE),
    "squares that vanish": (
        lambda z: masked((1e-22 * z) ** 2 @ jnp.ones((3, T)) > 0),
        WIDE,
    ),
    "distances": (
        lambda z: masked(
            (lambda g: jnp.diag(g)[:, None] + jnp.diag(g) - 2 * g >= 0)(gram(z))
        ),
        WIDE,
    ),
    "another order": (lambda z: masked((z * 3) @ z.T >= 3 * gram(z)), WIDE),
    "infinite": (lambda z: masked(gram(z * 1e30) < jnp.inf), WIDE),
}
"""Masks of products, of which the laws of real numbers know the sign."""

# --------------------------------------------------------------- operands
Z = normal(11, T, scale=60)


def biased(bias: Program) -> Program:
    return lambda z: attend(dots(Q, K) + bias(z), V)


def gated(keep: Program) -> Program:
    return lambda z: masked(keep(z))


STABLE = {
    "log_softmax": biased(jax.nn.log_softmax),
    "log of softmax": biased(lambda z: jnp.log(jax.nn.softmax(z) + 1e-6)),
    "log_sigmoid": biased(jax.nn.log_sigmoid),
    "softplus": biased(lambda z: -jax.nn.softplus(z)),
    "logsumexp": biased(lambda z: z - jax.nn.logsumexp(z)),
    "logcumsumexp": biased(lax.cumlogsumexp),
    "forgetting": lambda z: attend(
        jnp.where(
            AT[:, None] >= AT,
            dots(Q, K) + _differences(jnp.cumsum(jax.nn.log_sigmoid(z))),
            -1e9,
        ),
        V,
    ),
    "variance": biased(lambda z: (z - z.mean()) / (z.std() + 1e-6)),
    "softmax mask": gated(lambda z: jax.nn.softmax(z) > 1e-6),
    "log_softmax mask": gated(lambda z: jax.nn.log_softmax(z) > -20),
    "sigmoid mask": gated(lambda z: jax.nn.sigmoid(3 * z) > 0.3),
    "tanh mask": gated(lambda z: jnp.tanh(3 * z) > 0.3),
    "top-p mask": gated(lambda z: jnp.cumsum(jax.nn.softmax(z)) < 0.9),
    "top-k mask": gated(lambda z: z >= lax.top_k(z, 9)[0][-1]),
    "mean mask": gated(lambda z: z > z.mean()),
    "logistic by hand": gated(lambda z: 1 / (1 + jnp.exp(-3 * z)) > 0.3),
    "rms scale": lambda z: _rms(normal(12, 40, T)) * jax.nn.softmax(z),
    "layer bias": lambda z: _layer(normal(12, 40, T)) + jax.nn.log_softmax(z),
    "unit bias": lambda z: (
        jax.nn.silu(normal(13, 40, 16) @ normal(14, 16, T) + jax.nn.softmax(z))
        * (normal(13, 40, 16) @ normal(15, 16, T))
    ),
    "over a choice": lambda z: _rms(normal(12, 40, T)) / jnp.where(z > 0, z, 0.0),
    "over a mask": lambda z: _rms(normal(12, 40, T)) / jnp.where(z > 0, 2.0, 0.0),
    "temperature": lambda z: attend(dots(Q, K) * jax.nn.softmax(z).max(), V),
    "slopes": lambda z: attend(dots(Q, K) - jax.nn.softmax(z)[0] * abs(DISTANCE), V),
    "queries": lambda z: attend(dots(jax.nn.softmax(Q * 60), K), V),
}


def _differences(x: Any) -> Any:
    return x[:, None] - x


def _rms(x: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _layer(x: Any) -> Any:
    y = x - x.mean(-1, keepdims=True)
    return y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)


def pruned(f: Program) -> Program:
    """Attention whose weights are chosen by what they are."""

    def attention(scale: Any) -> Any:
        s = dots(Q, K) * scale
        return jnp.einsum("bnts,bsnh->btnh", f(jax.nn.softmax(s), s), V)

    return attention


def _again(p: Any) -> Any:
    return p / p.sum(-1, keepdims=True)


PRUNED = {
    "threshold": pruned(lambda p, s: jnp.where(p > 1e-3, p, 0.0)),
    "threshold, normalized": pruned(lambda p, s: _again(jnp.where(p > 1e-3, p, 0.0))),
    "of scores": pruned(lambda p, s: jnp.where(s > 0.1, p, 0.0)),
    "top-k": pruned(lambda p, s: jnp.where(p >= lax.top_k(p, 5)[0][..., -1:], p, 0.0)),
    "peak": pruned(lambda p, s: jnp.where(p == p.max(-1, keepdims=True), p, 0.0)),
    "mean": pruned(lambda p, s: jnp.where(p > p.mean(-1, keepdims=True), p, 0.0)),
    "square": pruned(lambda p, s: _again(p * p)),
    "floor": pruned(lambda p, s: jnp.maximum(p, 1e-3)),
    "cap": pruned(lambda p, s: jnp.minimum(p, 0.1)),
    "product": pruned(lambda p, s: p * (p > 1e-3)),
    "scores as a bias": pruned(lambda p, s: jax.nn.softmax(s + jnp.where(s > 1, 1, 0))),
}

# ----------------------------------------------------------------- guards
X = normal(20, 24, 32)
X[5] = 0
X[6] = 3
BROKEN = K.copy()
BROKEN[:, T - 4 :] = np.inf
NAN = K.copy()
NAN[:, T - 4 :] = np.nan


def guarded_scores(guard: Program) -> Program:
    return lambda k: attend(guard(dots(Q, k)), V)


def centred(x: Any) -> tuple[Any, Any]:
    y = x - x.mean(-1, keepdims=True)
    return y, (y * y).mean(-1, keepdims=True)


def guarded_norm(f: Program) -> Program:
    return lambda x: f(*centred(x))


GUARDED_ROWS = {
    "where": guarded_norm(
        lambda y, v: jnp.where(v > 0, y * lax.rsqrt(jnp.where(v > 0, v, 1)), 0)
    ),
    "inner where": guarded_norm(lambda y, v: y * lax.rsqrt(jnp.where(v > 0, v, 1))),
    "equal": guarded_norm(lambda y, v: y * lax.rsqrt(jnp.where(v == 0, 1, v))),
    "not equal": guarded_norm(lambda y, v: y * lax.rsqrt(jnp.where(v != 0, v, 1))),
    "sqrt": guarded_norm(lambda y, v: y / jnp.sqrt(jnp.where(v > 0, v, 1))),
    "std": guarded_norm(lambda y, v: y / jnp.where(v > 0, jnp.sqrt(v), 1)),
    "finite": guarded_norm(
        lambda y, v: (lambda z: jnp.where(jnp.isfinite(z), z, 0))(y * lax.rsqrt(v))
    ),
    "nan_to_num": guarded_norm(lambda y, v: jnp.nan_to_num(y * lax.rsqrt(v))),
    "at least": guarded_norm(lambda y, v: y * lax.rsqrt(jnp.maximum(v, 1e-6))),
    "eps": guarded_norm(lambda y, v: y * lax.rsqrt(v + 1e-6)),
    "rms": lambda x: (
        lambda v: jnp.where(v > 0, x * lax.rsqrt(jnp.where(v > 0, v, 1)), 0)
    )((x * x).mean(-1, keepdims=True)),
    "chosen root, scaled": lambda x: (
        lambda v: (
            x * jnp.where(v > 0, lax.rsqrt(v), 1) * jnp.arange(1.0, x.shape[1] + 1)
        )
    )((x * x).mean(-1, keepdims=True)),
    "chosen result, scaled": lambda x: (
        lambda v: (
            jnp.where(v > 0, x * lax.rsqrt(v), 0) * jnp.arange(1.0, x.shape[1] + 1)
        )
    )((x * x).mean(-1, keepdims=True)),
    "rms eps": lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12),
}
GUARDED_SCORES = {
    "isfinite": guarded_scores(lambda s: jnp.where(jnp.isfinite(s), s, -1e9)),
    "isnan": guarded_scores(lambda s: jnp.where(jnp.isnan(s), -1e9, s)),
    "unequal to itself": guarded_scores(lambda s: jnp.where(s != s, -1e9, s)),
    "isinf": guarded_scores(lambda s: jnp.where(jnp.isinf(s), -1e9, s)),
    "nan_to_num": guarded_scores(jnp.nan_to_num),
    "nan_to_num fills": guarded_scores(
        lambda s: jnp.nan_to_num(s, nan=-1e9, posinf=0.0, neginf=-1e9)
    ),
    "clip": guarded_scores(lambda s: jnp.clip(s, -1e8, 1e8)),
    "minimum": guarded_scores(lambda s: jnp.minimum(s, 3e38)),
    "equal to inf": guarded_scores(lambda s: jnp.where(s == jnp.inf, 0.0, s)),
    "abs below inf": guarded_scores(lambda s: jnp.where(abs(s) < jnp.inf, s, -1e9)),
    "zero times": guarded_scores(lambda s: s + 0 * s),
    "less itself": guarded_scores(lambda s: s + (s - s)),
    "weights": lambda k: jnp.einsum(
        "bnts,bsnh->btnh", jnp.nan_to_num(jax.nn.softmax(dots(Q, k))), V
    ),
}

EMPTY = np.random.default_rng(12).integers(0, 3, (1, 1, T, T)) > 0
EMPTY[:, :, ::7] = False  # rows without keys
FILLS: dict[str, Program] = {
    "chosen": lambda s, m: jnp.where(m, s, -jnp.inf),
    "added": lambda s, m: s + jnp.where(m, 0.0, -jnp.inf),
    "added, twice": lambda s, m: (
        s + jnp.where(m, 0.0, -jnp.inf) + jnp.where(AT > 2, 0.0, -jnp.inf)
    ),
    "added number": lambda s, m: s + jnp.where(m, 0.0, -1e30),
}
ENDS: dict[str, Program] = {
    "one more": lambda s, m: (
        lambda top: (
            jnp.exp(s - top) / (jnp.exp(-top) + jnp.exp(s - top).sum(-1, keepdims=True))
        )
    )(s.max(-1, keepdims=True)),
    "one more column": lambda s, m: jax.nn.softmax(
        jnp.concatenate([s, jnp.zeros((1, N, T, 1))], -1)
    )[..., :-1],
    "chosen weights": lambda s, m: jnp.where(m, jax.nn.softmax(s), 0.0),
    "weights times mask": lambda s, m: jax.nn.softmax(s) * m,
    "unstable, chosen": lambda s, m: jnp.where(
        m, jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True), 0.0
    ),
}

CAUSAL = np.tril(np.ones((T, T), bool))


def shares(e: Any) -> Any:
    return e / e.sum(-1, keepdims=True)


UNSHIFTED: dict[str, Program] = {
    "plain": lambda s: shares(jnp.exp(s)),
    "twice": lambda s: jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True),
    "times the inverse": lambda s: jnp.exp(s) * (1 / jnp.exp(s).sum(-1, keepdims=True)),
    "powers of two": lambda s: shares(jnp.exp2(s * np.log2(np.e))),
    "chosen": lambda s: shares(jnp.exp(jnp.where(CAUSAL, s, -jnp.inf))),
    "chosen number": lambda s: shares(jnp.exp(jnp.where(CAUSAL, s, -1e30))),
    "left out": lambda s: shares(jnp.where(CAUSAL, jnp.exp(s), 0)),
    "with a bias": lambda s: shares(jnp.exp(s + 0.1 * AT)),
    "with one more": lambda s: (lambda e: e / (1 + e.sum(-1, keepdims=True)))(
        jnp.exp(s)
    ),
    "with a little": lambda s: (lambda e: e / (1e-9 + e.sum(-1, keepdims=True)))(
        jnp.exp(s)
    ),
    "half": lambda s: shares(jnp.exp((s / 8).astype("float16"))).astype("float32"),
    "capped": lambda s: shares(jnp.exp(30 * jnp.tanh(s / 30))),
    "capped high": lambda s: shares(jnp.exp(500 * jnp.tanh(s / 500))),
    "less a number": lambda s: shares(jnp.exp(s - 7)),
    "less the mean": lambda s: shares(jnp.exp(s - s.mean(-1, keepdims=True))),
    "by a logarithm": lambda s: jnp.exp(s - jnp.log(jnp.exp(s).sum(-1, keepdims=True))),
    "less the maximum of all": lambda s: shares(jnp.exp(s - s.max())),
    "stopped": lambda s: shares(jnp.exp(s - lax.stop_gradient(s.max()))),
    "of a head": lambda s: shares(jnp.exp(s - s.max((2, 3), keepdims=True))),
    "of a key": lambda s: shares(jnp.exp(s - s.max(2, keepdims=True))),
    "of all sums": lambda s: shares(jnp.exp(s - jax.nn.logsumexp(s))),
    "stable": lambda s: jax.nn.softmax(s),
    "stable logarithm": lambda s: jnp.exp(jax.nn.log_softmax(s)),
}
"""Weights of scores, most of them without the maximum: they overflow."""
LARGE_ROWS = Q.copy()
LARGE_ROWS[:, ::5] *= 1000
LARGE_ROWS[:, 1::5, 0] = 400 * np.sign(LARGE_ROWS[:, 1::5, 0])
K_UP = np.abs(K)

KINDS: dict[str, dict[str, tuple]] = {
    "unshifted": {
        f"{n}, {size}": (
            lambda q, k=k, f=f, n=n: (
                lambda out: jnp.where(jnp.isnan(out), out, 0) if n == "half" else out
            )(jnp.einsum("bnts,bsnh->btnh", f(dots(q, k)), V)),
            LARGE_ROWS,
        )
        for n, f in UNSHIFTED.items()
        for size, k in (("mixed", K), ("one sign", K_UP))
    },
    "hidden rows": {
        f"{fill}, {end}": (
            lambda m, hide=hide, weigh=weigh: jnp.einsum(
                "bnts,bsnh->btnh", weigh(hide(dots(Q, K), m), m), V
            ),
            EMPTY,
        )
        for fill, hide in FILLS.items()
        for end, weigh in ENDS.items()
    },
    "floats": FLOATS,
    "cancelled": {
        n: (lambda g, f=f: masked(f(g)), NOT_ALL_NUMBERS.astype("float32"))
        for n, f in CANCELLED.items()
    }
    | {"bias": (lambda g: attend(dots(Q, K) + (g - g), V), NEAR_INFINITY)},
    "low precision": LOW_PRECISION,
    "thresholds": THRESHOLDS,
    "integers": INTEGERS,
    "folded": FOLDED,
    "contracted": CONTRACTED,
    "stable": {n: (f, Z) for n, f in STABLE.items()},
    "pruned": {
        f"{n} {s}": (f, np.float32(s)) for n, f in PRUNED.items() for s in (1, 4)
    },
    "guarded rows": {n: (f, X) for n, f in GUARDED_ROWS.items()},
    "guarded scores": {
        f"{n} {what}": (f, k)
        for n, f in GUARDED_SCORES.items()
        for what, k in (("inf", BROKEN), ("nan", NAN))
    },
}
LEAST = {
    "unshifted": 28,
    "hidden rows": 8,
    "floats": 16,
    "stable": 19,
    "integers": 19,
    "thresholds": 20,
}
"""How many sites of a kind are replaced at least: a mask that is no structure is the
program's own."""


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    cases = KINDS[kind]
    assert len(cases) >= 10
    fast = {
        name: rewriter.optimize(f, implementation=FORCED, strict=True)
        for name, (f, *_) in cases.items()
    }
    given = {name: args for name, (_, *args) in cases.items()}
    before = jax.jit(lambda g: {n: cases[n][0](*a) for n, a in g.items()})(given)
    after = jax.jit(lambda g: {n: fast[n](*a) for n, a in g.items()})(given)
    wrong = {n: text for n in cases if (text := differs(before[n], after[n]))}
    assert not wrong
    reports = [fast[n].report(*given[n]) for n in cases if kind in LEAST]
    found = sum(any(s.replaced for s in r.sites) for r in reports)
    assert found >= LEAST.get(kind, 0)


HIDING: dict[str, Program] = {
    "chosen -inf": lambda s, keep: jnp.where(keep, s, -jnp.inf),
    "added -inf": lambda s, keep: s + jnp.where(keep, 0.0, -jnp.inf),
    "added to a bias": lambda s, keep: s + jnp.where(keep, 0.3, -jnp.inf),
    "chosen number": lambda s, keep: jnp.where(keep, s, -1e30),
    "added number": lambda s, keep: s + jnp.where(keep, 0.0, -1e30),
    "multiplied": lambda s, keep: s * keep + (1.0 - keep) * -1e30,
    "zero instead": lambda s, keep: jnp.where(
        keep.any(-1, keepdims=True), jnp.where(keep, s, -jnp.inf), 0.0
    ),
}
"""How keys are hidden, of which some rows have none that is not."""
WEIGHING: dict[str, Program] = {
    **{
        f"{hide}, softmax": lambda s, m, f=f: jax.nn.softmax(f(s, m))
        for hide, f in HIDING.items()
    },
    **{
        f"{fill}, {end}": lambda s, m, hide=hide, f=f: f(hide(s, m), m)
        for fill, hide in FILLS.items()
        for end, f in ENDS.items()
    },
}
"""How rows are weighed."""


def test_gradients_of_rows_without_keys() -> None:
    """They are what they were: numbers, zeros or NaN."""
    keep = np.random.default_rng(0).random((1, N, T, T)) < 0.5
    keep[:, 0, 5] = keep[:, 1, :7] = False

    def loss(weigh: Program) -> Program:
        return lambda q, k, v: (
            jnp.einsum("bnts,bsnh->btnh", weigh(dots(q, k), keep), v) ** 2
        ).sum()

    def gradients(of: Callable[[Program], Program], given: Any) -> Any:
        return {n: of(loss(weigh))(*given) for n, weigh in WEIGHING.items()}

    grad = lambda f: jax.grad(f, (0, 1, 2))
    optimized = lambda f: rewriter.optimize(f, implementation=FORCED, strict=True)
    run = jax.jit(gradients, static_argnums=0)
    want = run(grad, (Q, K, V))
    for way in (lambda f: grad(optimized(f)), lambda f: optimized(grad(f))):
        got = run(way, (Q, K, V))
        pairs = {n: zip(want[n], got[n], strict=True) for n in want}
        wrong = {n: [differs(*xy) for xy in of] for n, of in pairs.items()}
        assert not {n: text for n, text in wrong.items() if any(text)}


def test_gradients_of_rows_that_overflow() -> None:
    """NaN in queries as written; in keys and values of that head alone."""
    queries = LARGE_ROWS.copy()
    queries[:, :, 1:] = Q[:, :, 1:]
    names = ("plain", "powers of two", "chosen", "with one more")

    def loss(f: Program) -> Program:
        return lambda q, k, v: (
            jnp.einsum("bnts,bsnh->btnh", f(dots(q, k)), v) ** 2
        ).sum()

    def gradients(of: Callable[[Program], Program], given: Any) -> Any:
        return {n: of(loss(UNSHIFTED[n]))(*given) for n in names}

    grad = lambda f: jax.grad(f, (0, 1, 2))
    optimized = lambda f: rewriter.optimize(f, implementation=FORCED, strict=True)
    run = jax.jit(gradients, static_argnums=0)
    want = run(grad, (queries, K, V))
    for way in (lambda f: grad(optimized(f)), lambda f: optimized(grad(f))):
        got = run(way, (queries, K, V))
        for n in names:
            assert not differs(want[n][0], got[n][0]), n
            for x, y in zip(want[n][1:], got[n][1:], strict=True):
                assert not (np.isnan(x) & ~np.isnan(y)).any(), n
                assert not differs(x[:, :, 1:], y[:, :, 1:]), n
        assert np.isnan(got["plain"][1][:, :, 0]).any()


def by_squares(x: Any) -> Any:
    return jnp.maximum(
        (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2, 0
    )


def by_product(x: Any) -> Any:
    squares = jnp.einsum("td,td->t", x, x)[:, None] / x.shape[1]
    return squares - jnp.square(x.mean(-1, keepdims=True))


def test_rows_whose_squares_overflow() -> None:
    """A difference of infinite squares is NaN; an infinite square divides to zero."""
    rows = normal(3, 64, 32) * np.logspace(0, 22, 64, dtype="float32")[:, None]
    rows[::2] += abs(rows[::2]).max(1, keepdims=True)

    def norm(variance: Program) -> Program:
        def f(x: Any, g: Any) -> Any:
            y = x - x.mean(-1, keepdims=True)
            return y * lax.rsqrt(variance(x) + 1e-5) * g

        return f

    ways = {
        "of squares": norm(by_squares),
        "of a product": norm(by_product),
        "centred": norm(lambda x: x.var(-1, keepdims=True)),
    }
    rows, scale = jnp.asarray(rows), jnp.asarray(normal(4, 32))
    for name, f in ways.items():
        fast = rewriter.optimize(f, implementation=FORCED, strict=True)
        assert fast.report(rows, scale).sites[0].replaced
        x, y = np.asarray(jax.jit(f)(rows, scale)), np.asarray(fast(rows, scale))
        assert (np.isnan(x) == np.isnan(y)).all(), name
        assert np.isnan(x).any() == (name != "centred")
        grads = [
            jax.grad(lambda *a, f=f: f(*a).sum(), 1)(rows, scale) for f in (f, fast)
        ]
        assert (np.isnan(grads[0]) == np.isnan(grads[1])).all(), name


def differs(x: Any, y: Any, least: float = 1e-6) -> str:
    """What is not as it was; nothing if all is.

    Args:
        x: What was there.
        y: What is there now.
        least: The magnitude that rounding is of, if all numbers are smaller.
    """
    x, y = (np.asarray(a, "float64") for a in (x, y))
    for test in (np.isnan, np.isposinf, np.isneginf):
        if (test(x) != test(y)).any():
            return f"{test.__name__} of {test(x).sum()} entries, now of {test(y).sum()}"
    finite = np.isfinite(x)
    error = np.abs(np.where(finite, x, 0) - np.where(finite, y, 0)).max()
    largest = max(np.abs(np.where(finite, x, 0)).max(), least)
    return f"off by {error / largest:.1e}" if error > 2e-5 * largest else ""
