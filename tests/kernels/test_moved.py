"""Programs rewritten for Hopper GPUs move no large arrays that they did not move before.

Each case is one op, whose arrays lie as programs have them; nothing is timed or run.
"""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import slow
from tests.support.kernels import moved

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
Specs = tuple[jax.ShapeDtypeStruct, ...]


def arrays(*shapes: tuple[int, ...], dtype: Any = BF16) -> Specs:
    return tuple(jax.ShapeDtypeStruct(x, dtype) for x in shapes)


# --------------------------------------------------------------- attention
def attention(
    form: str, keys: str, out: str, window: Any = None, wide: bool = False
) -> Callable[..., Any]:
    """Attention by einsum of q, k and v in some order of axes."""
    scores = "".join(x for x in "bkgnts" if x in form + keys)

    def run(q: Any, k: Any, v: Any) -> Any:
        x = jnp.einsum(f"{form},{keys}->{scores}", q, k, preferred_element_type=F32)
        x = x * q.shape[-1] ** -0.5
        if window is not None:
            away = jnp.arange(x.shape[-1])[None] - jnp.arange(x.shape[-2])[:, None]
            x = jnp.where((away <= 0) & (away >= -window), x, -1e30)
        weights = jax.nn.softmax(x)
        weights = weights if wide else weights.astype(v.dtype)
        return jnp.einsum(f"{scores},{keys}->{out}", weights, v)

    return run


def repeated(q: Any, k: Any, v: Any) -> Any:
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    return attention("btnh", "bsnh", "btnh", 1 << 20)(q, k, v)


def packed(x: Any) -> Any:
    """Queries, keys and values that one product gave."""
    q, k, v = jnp.split(x, 3, 2)
    return attention("btnh", "bsnh", "btnh")(q, k, v)


def cached(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """One query for each sequence, and keys up to its length."""
    group = q.shape[1] // k.shape[2]
    q = q.reshape(q.shape[0], k.shape[2], group, q.shape[2])
    x = jnp.einsum("bkgh,bskh->bkgs", q, k, preferred_element_type=F32) * 0.1
    keep = jnp.arange(k.shape[1]) < lengths[:, None]
    x = jnp.where(keep[:, None, None], x, -1e30)
    made = jnp.einsum("bkgs,bskh->bkgh", jax.nn.softmax(x).astype(v.dtype), v)
    return made.reshape(q.shape[0], -1, v.shape[3])


SELF, BNTH = attention("btnh", "bsnh", "btnh"), attention("bnth", "bnsh", "bnth")
BOTH, FORWARD = ("forward", "both"), ("forward",)
HOPPER, DECODE = "hopper", "hopper_decode"
Case = tuple[str, Callable[..., Any], Specs, tuple[str, ...]]
ATTENTION: dict[str, Case] = {
    "plain": (HOPPER, SELF, arrays(*[(4, 2048, 16, 128)] * 3), BOTH),
    "heads of 64": (HOPPER, SELF, arrays(*[(4, 2048, 16, 64)] * 3), BOTH),
    "odd, heads of 64": (HOPPER, SELF, arrays(*[(16, 577, 16, 64)] * 3), BOTH),
    "odd, heads of 32": (HOPPER, SELF, arrays(*[(64, 49, 12, 32)] * 3), BOTH),
    "odd, heads of 128": (HOPPER, SELF, arrays(*[(4, 1023, 16, 128)] * 3), BOTH),
    "odd, heads of 256": (HOPPER, SELF, arrays(*[(2, 1023, 8, 256)] * 3), BOTH),
    "odd, heads of 80": (HOPPER, SELF, arrays(*[(32, 257, 16, 80)] * 3), BOTH),
    "odd, heads of 72": (HOPPER, SELF, arrays(*[(16, 729, 16, 72)] * 3), BOTH),
    "heads of 72": (HOPPER, SELF, arrays(*[(8, 736, 16, 72)] * 3), BOTH),
    "77 keys, heads of 40": (
        HOPPER,
        SELF,
        arrays((8, 4096, 8, 40), *[(8, 77, 8, 40)] * 2),
        BOTH,
    ),
    "ViT-B": (HOPPER, SELF, arrays(*[(64, 197, 12, 64)] * 3), BOTH),
    "heads of 256": (HOPPER, SELF, arrays(*[(2, 2048, 8, 256)] * 3), BOTH),
    "float32 weights": (
        HOPPER,
        attention("btnh", "bsnh", "btnh", None, True),
        arrays(*[(4, 2048, 16, 64)] * 3),
        BOTH,
    ),
    "float32": (HOPPER, SELF, arrays(*[(2, 577, 16, 64)] * 3, dtype=F32), BOTH),
    "window": (
        HOPPER,
        attention("btnh", "bsnh", "btnh", 1023),
        arrays(*[(1, 8192, 16, 64)] * 3),
        BOTH,
    ),
    "one sequence": (
        HOPPER,
        attention("tnh", "snh", "tnh", 1 << 20),
        arrays(*[(4096, 16, 128)] * 3),
        BOTH,
    ),
    "keys repeated": (
        HOPPER,
        repeated,
        arrays((2, 2048, 32, 128), *[(2, 2048, 8, 128)] * 2),
        BOTH,
    ),
    "groups": (
        HOPPER,
        attention("btkgh", "bskh", "btkgh", 1 << 20),
        arrays((2, 2048, 8, 4, 128), *[(2, 2048, 8, 128)] * 2),
        BOTH,
    ),
    "cross": (HOPPER, SELF, arrays((8, 4096, 8, 64), *[(8, 80, 8, 64)] * 2), BOTH),
    "values of 128": (
        HOPPER,
        SELF,
        arrays(*[(2, 2048, 16, 192)] * 2, (2, 2048, 16, 128)),
        BOTH,
    ),
    "heads first": (HOPPER, BNTH, arrays(*[(4, 16, 2048, 64)] * 3), FORWARD),
    "one head": (
        HOPPER,
        attention("bth", "bsh", "bth"),
        arrays(*[(32, 2048, 64)] * 3),
        BOTH,
    ),
    "packed": (HOPPER, packed, arrays((4, 2048, 48, 64)), FORWARD),
    "decoding": (
        DECODE,
        repeated,
        arrays((16, 1, 32, 128), *[(16, 4096, 8, 128)] * 2),
        FORWARD,
    ),
    "decoding, one sequence": (
        DECODE,
        repeated,
        arrays((1, 1, 32, 128), *[(1, 32768, 8, 128)] * 2),
        FORWARD,
    ),
    "decoding, no batch": (
        DECODE,
        attention("kgh", "skh", "kgh"),
        arrays((8, 4, 128), *[(32768, 8, 128)] * 2),
        FORWARD,
    ),
    "decoding, no batch, heads first": (
        DECODE,
        attention("kgh", "ksh", "kgh"),
        arrays((8, 4, 128), *[(8, 32768, 128)] * 2),
        FORWARD,
    ),
    "decoding, no groups": (
        DECODE,
        attention("bnh", "bsnh", "bnh"),
        arrays((8, 16, 64), *[(8, 8192, 16, 64)] * 2),
        FORWARD,
    ),
    "decoding, one sequence, no groups": (
        DECODE,
        SELF,
        arrays((1, 1, 16, 64), *[(1, 32768, 16, 64)] * 2),
        FORWARD,
    ),
    "decoding, heads first": (
        DECODE,
        attention("bkgh", "bksh", "bkgh"),
        arrays((8, 8, 4, 128), *[(8, 8, 8192, 128)] * 2),
        FORWARD,
    ),
    "decoding, one key head": (
        DECODE,
        attention("bgh", "bsh", "bgh"),
        arrays((8, 16, 128), *[(8, 8192, 128)] * 2),
        FORWARD,
    ),
    "decoding, lengths": (
        DECODE,
        cached,
        (*arrays((16, 32, 128), *[(16, 4096, 8, 128)] * 2), *arrays((16,), dtype=I32)),
        FORWARD,
    ),
    "decoding, one sequence, length": (
        DECODE,
        cached,
        (*arrays((1, 32, 128), *[(1, 32768, 8, 128)] * 2), *arrays((1,), dtype=I32)),
        FORWARD,
    ),
    "decoding, float32 weights": (
        DECODE,
        attention("bkgh", "bskh", "bkgh", None, True),
        arrays((8, 8, 4, 128), *[(8, 8192, 8, 128)] * 2),
        FORWARD,
    ),
}


# ------------------------------------------------------------------- others
def rms(x: Any, scale: Any) -> Any:
    wide = x.astype(F32)
    made = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (made * scale).astype(x.dtype)


def layer(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(F32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.square(wide - mean).mean(-1, keepdims=True)
    made = (wide - mean) * jax.lax.rsqrt(var + 1e-5)
    return (made * scale + bias).astype(x.dtype)


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


def halves(x: Any, w: Any) -> Any:
    gate, up = jnp.split(x @ w, 2, -1)
    return jax.nn.silu(gate) * up


def experts(x: Any, gate: Any, up: Any, sizes: Any) -> Any:
    return jax.nn.silu(jax.lax.ragged_dot(x, gate, sizes)) * jax.lax.ragged_dot(
        x, up, sizes
    )


def narrow(x: Any, w: Any, scale: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(x, w.astype(BF16) * scale[:, None].astype(BF16), sizes)


ROW = arrays((1024,), (1024,), dtype=F32)
GROUPS = arrays((16,), dtype=I32)
OTHERS: dict[str, tuple[str, Case]] = {
    "rms norm": ("rms_norm", (HOPPER, rms, (*arrays((8, 2048, 1024)), ROW[0]), BOTH)),
    "rms norm of heads": (
        "rms_norm",
        (HOPPER, rms, (*arrays((8, 2048, 32, 128)), *arrays((128,), dtype=F32)), BOTH),
    ),
    "layer norm": (
        "layer_norm",
        (HOPPER, layer, (*arrays((8, 1024, 1024)), *ROW), BOTH),
    ),
    "layer norm, odd": (
        "layer_norm",
        (HOPPER, layer, (*arrays((16, 577, 1024)), *ROW), BOTH),
    ),
    "layer norm, float32": (
        "layer_norm",
        (HOPPER, layer, (*arrays((4096, 1024), dtype=F32), *ROW), BOTH),
    ),
    "unit": (
        "gated_linear_unit",
        (HOPPER, swiglu, arrays((4, 1024, 2048), *[(2048, 4096)] * 2), FORWARD),
    ),
    "unit of halves": (
        "gated_linear_unit",
        (HOPPER, halves, arrays((4096, 2048), (2048, 8192)), FORWARD),
    ),
    "ragged": (
        "ragged_dot",
        (
            HOPPER,
            jax.lax.ragged_dot,
            (*arrays((4096, 1024), (16, 1024, 2048)), *GROUPS),
            BOTH,
        ),
    ),
    "ragged, odd": (
        "ragged_dot",
        (
            HOPPER,
            jax.lax.ragged_dot,
            (*arrays((4097, 1408), (16, 1408, 2048)), *GROUPS),
            BOTH,
        ),
    ),
    "ragged unit": (
        "ragged_gated_linear_unit",
        (
            HOPPER,
            experts,
            (*arrays((4096, 1024), *[(16, 1024, 2048)] * 2), *GROUPS),
            FORWARD,
        ),
    ),
    "ragged, int8": (
        "quantized_ragged_dot",
        (
            HOPPER,
            narrow,
            (
                *arrays((512, 1024)),
                *arrays((16, 1024, 2048), dtype=jnp.int8),
                *arrays((16, 2048), dtype=F32),
                *GROUPS,
            ),
            FORWARD,
        ),
    ),
}
CASES = {name: ("attention", case) for name, case in ATTENTION.items()} | OTHERS
QUICK = {
    "plain",
    "keys repeated",
    "decoding, one sequence",
    "layer norm, odd",
    "ragged, odd",
}

KNOWN: dict[tuple[str, str], dict[str, int]] = {
    # Results and gradients are written with positions before heads.
    ("heads first", "forward"): {
        "copy [4,16,2048,64]": 1,
        "transpose [4,16,2048,64]": 1,
    },
    # Halves of float32 numbers, which are computed: of q, k, v and the cotangent.
    ("float32", "forward"): {"concatenate [2,2,577,16,64]": 3},
    ("float32", "both"): {"concatenate [2,2,577,16,64]": 4},
    # As the program has it.
    ("packed", "forward"): {"slice [4,2048,16,64]": 3},
    # Matrices are two arrays: it is taken only where it is asked for, or was measured.
    ("unit of halves", "forward"): {"slice [2048,4096]": 2},
}
"""Moves that are left."""


def of_pass(fn: Callable[..., Any], specs: Specs, passes: str) -> Callable[..., Any]:
    """A function, or one of its result and gradients."""
    if passes == "forward":
        return fn
    moving = [i for i, x in enumerate(specs) if jnp.issubdtype(x.dtype, jnp.floating)]

    def both(*args: Any) -> Any:
        def some(*given: Any) -> Any:
            rest = dict(zip(moving, given, strict=True))
            return fn(*(rest.get(i, x) for i, x in enumerate(args)))

        out, back = jax.vjp(some, *(args[i] for i in moving))
        return out, back(jax.tree.map(jnp.cos, out))

    return both


@pytest.mark.parametrize(
    ("name", "passes"),
    slow.unless(
        lambda name, passes: name in QUICK,
        [(name, p) for name, (_, case) in CASES.items() for p in case[3]],
        several=True,
    ),
)
def test_nothing_large_is_moved_beside_the_kernel(name: str, passes: str) -> None:
    op, (kernel, fn, specs, _) = CASES[name]
    run = of_pass(fn, specs, passes)
    with moved.opaque_kernels():
        around = moved.around_kernels(run, {op: kernel}, *specs)
        found = moved.moves(around, *specs)
    assert found == KNOWN.get((name, passes), {})
