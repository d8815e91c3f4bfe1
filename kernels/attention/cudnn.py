"""Attention by cuDNN, through `jax.nn.dot_product_attention`.

cuDNN is fast on recent NVIDIA GPUs. It supports 16-bit operands, the masks that it
knows by name, lengths of keys, and arrays of biases or masks. These arrays are passed
in whole rows, with large numbers for infinities. Queries that see no key are corrected
afterwards.

JAX does not promise that its call stays the same, so it cannot be part of an exported
program. It can only be traced where cuDNN is installed. Of a GPU that is not here
`cudnn_limits` says what JAX would take there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.cudnn_limits import traced_on
from rewriter.kernels.attention.empty_rows import AVERAGED, NAN, PASSES, passed
from rewriter.kernels.attention.estimate import (
    FULL_WIDTH,
    copies,
    least,
    made_even,
    of_xla,
    share,
    whole,
    widened,
)
from rewriter.kernels.attention.memory import temporary
from rewriter.kernels.attention.op import OP
from rewriter.kernels.attention.reference import visible
from rewriter.ops.device import Device, deterministic_xla
from rewriter.ops.estimate import LAUNCH_S, seconds
from rewriter.ops.kernel import Kernel, Limits, Spec, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

PLAIN = frozenset({"q", "k", "v"})
TABLES = frozenset({"bias", "mask"})
TAKEN = PLAIN | TABLES | {"kv_lengths"}

TRIED = PLAIN
"""Operands with which its numbers were compared on a GPU (``tests/kernels/
test_cudnn.py``). With others it is chosen only if it was measured, and so compared, or
if the user asks for it."""

TYPES = ("bfloat16", "float16")

LARGE = {"float16": -(2.0**15)}
"""The number added to hidden scores (else `LARGEST`): infinities become NaN."""

LARGEST = -(2.0**41)


ABSENT = (
    "JAX cannot trace it on this machine, which has no cuDNN. `rewriter.explain(target="
    ")` says what such a GPU would choose"
)


def supports(spec: Spec) -> Verdict:
    """Supports 16-bit q, k, v, tables and lengths, causal or with a left window.

    The last check traces cuDNN itself, on the device that is here.
    """
    verdict = _taken(spec)
    return _asked(spec) if verdict.ok else verdict


def supports_on(spec: Spec, device: Device) -> Verdict:
    """The same of a device that is not here, by what JAX would say there."""
    if not (device.capability and device.cudnn):
        return supports(spec)
    return all_of(_taken(spec), traced_on(spec, device))


def _taken(spec: Spec) -> Verdict:
    return all_of(_operands(spec), _types(spec), _masks(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for 128 queries and keys and more if their scores take 48 MiB.

    Measured on an H200 (``tests/bench/results/cudnn_h200.json``): 1.3 to 14 times as
    fast as XLA from there on, as fast or slower for 24 MiB and less.
    """
    del platform  # it needs only a GPU
    return modelled(spec)


def deterministic(config: object) -> Verdict:
    """Returns no: the order of additions in its gradients varies between runs.

    Returns yes if ``XLA_FLAGS`` ask for determinism, which XLA passes on to cuDNN.
    """
    del config
    if deterministic_xla():
        return YES
    return no("deterministic", "its gradients' sums differ from run to run")


FEWEST, LEAST_SCORES = 50, 16 << 20
"""The fewest queries and keys, and bytes of float32 scores, of which it was faster than
XLA on an H200 (``tests/bench/results/choices_small_h200.json``)."""


FEW_TILES, FEW_SCORES = 64, 1 << 19
"""Tiles of `TILE` queries up to which it is faster than our kernels, whose gradients
are two of them, and the fewest bytes of scores: 4.3 µs of XLA's 5.7 with 128 queries of
12 heads, 5.1 of our 7.1 with 256, 40 of our 44 with 512 and gradients (the same
figures)."""


def _is_of_few_tiles(spec: Spec) -> bool:
    """Whether few tiles are all there is."""
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    few = b * n * -(-t // TILE) <= FEW_TILES and min(t, s) >= TILE
    return few and 4 * b * n * t * s >= FEW_SCORES


def modelled(spec: Spec, device: Device | None = None, passes: str = "") -> Verdict:
    """Returns whether it was measured and compared on a GPU, of such operands."""
    del device, passes
    if more := ", ".join(sorted(set(spec.operands) - TRIED)):
        return no("untried", f"not compared with {more} on a GPU: measure it with tune")
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    scores = 4 * b * n * t * s
    enough = min(t, s) >= FEWEST and scores >= LEAST_SCORES
    if enough or _is_of_few_tiles(spec):
        return YES
    text = f"{t} queries, {s} keys and scores of {scores / (1 << 20):.3g} MiB"
    least = f"below {FEWEST} of them or {LEAST_SCORES >> 20} MiB"
    return no("small", f"{text} are so little that XLA is as fast: {least}")


# ------------------------------------------------------------------- its estimate
STEP = 64
"""cuDNN is assumed to pad heads to multiples of it. With 1k keys it takes 0.224 ms for
heads of 80 and 0.225 for heads of 128. With 4k keys and a causal mask it takes 0.928
for heads of 96 and 0.913 for heads of 128
(``tests/bench/results/hopper_attention_h200.json``)."""

TILE = 128
"""cuDNN is assumed to compute whole tiles of this many queries and keys. On an H200 it
takes 44 microseconds for 160 and for 192 positions, 64 sequences of 12 heads of 64
(``tests/bench/results/hopper_float32_h200.json``)."""

STEPS = {
    "begin": 2.2e-6, "forward": 0.58e-6, "begin backward": 7e-6, "backward": 1.6e-6,
    "wider": 0.33, "wider backward": 0.8,
}  # fmt: skip
"""Seconds of `STEP` keys of a tile, of as many queries in the gradients, and of what
comes before, in heads of up to 128; wider ones take twice as long for their width. 11.6
µs for 1024 positions of 4 heads of 64, and 42.6
with gradients; 5.2 and 18.8 for 256 of 12
(``tests/bench/results/choices_few_scores_h200.json``). Keys of heads of 128 take 1.33
times as long as those of 64, and queries in the gradients 1.8 times
(``few_tiles_h200.json`` there). Heads of 80 take as long as those of 128: 944 positions
17 and 66 µs (``held_out_seed8_h200.json``)."""

FEW_TILES_SHARE = 0.95
"""The share of XLA's time that is enough for gradients of few tiles: 66 of 81 µs for
185 queries and 2293 keys, estimated at 67 of 74 (``few_tiles_h200.json`` there)."""

WIDE = 0.85
"""The share of its rate that cuDNN reaches in gradients of heads wider than 128; our
kernel loses nothing there."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, and of ``"cudnn"``."""
    own = _seconds(spec, device, passes)
    return {"xla": of_xla(spec, device, passes), "cudnn": own}


def margin(spec: Spec, device: Device, passes: str) -> float | None:
    """Returns the share of XLA's time that is enough; None for the usual one.

    Where few tiles are all there is, gradients are estimated within a tenth.
    """
    if passes == "forward" or not modelled(spec).ok:
        return None
    few = _in_turn(spec, True) >= _at_full_rate(spec, device, True)
    return FEW_TILES_SHARE if few else None


def _seconds(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds of cuDNN, copies that make lengths even included."""
    if not modelled(spec).ok:
        return math.inf
    both = passes != "forward"
    made = max(_at_full_rate(spec, device, both), least(spec, device, passes))
    made = max(made, _in_turn(spec, both))
    return made + copies(device, made_even(spec, both))


def _at_full_rate(spec: Spec, device: Device, both: bool) -> float:
    """Returns the seconds of whole tiles that keep all processors busy."""
    passes = "forward_and_vjp" if both else "forward"
    (_, t, _, h), s = spec.shape("q"), spec.shape("k")[1]
    flops = widened(spec, passes, STEP) * whole(t, TILE) * whole(s, TILE)
    reached = share(passes, -(-h // STEP) * STEP)
    reached *= WIDE if both and h > FULL_WIDTH else 1.0
    launches = 8 if both else 3
    if _is_of_few_tiles(spec):
        launches = 4 if both else 1
    return seconds(device, flops, 0.0, compute=reached, launches=launches)


def _in_turn(spec: Spec, both: bool) -> float:
    """Returns the seconds of a tile's blocks, which follow one another: see `STEPS`."""
    (_, t, _, h), s = spec.shape("q"), spec.shape("k")[1]
    left, _ = spec.param("window", (None, None))
    seen = s if left is None else min(s, left + TILE)
    wide = 1.0 if h <= FULL_WIDTH else 2 * h / FULL_WIDTH
    of_keys = wide * (1 + STEPS["wider"] * (h > STEP))
    copied = LAUNCH_S * 2 * (t % 2 + s % 2)
    forward = STEPS["begin"] + STEPS["forward"] * of_keys * -(-seen // STEP)
    if not both:
        return forward + copied
    wide *= 1 + STEPS["wider backward"] * (STEP < h <= FULL_WIDTH)
    steps = wide * -(-min(t, seen) // STEP)
    return forward + copied + STEPS["begin backward"] + STEPS["backward"] * steps


# ------------------------------------------------------------------- what it takes
def _operands(spec: Spec) -> Verdict:
    more = sorted(set(spec.operands) - TAKEN)
    if more:
        return no("operands", f"cuDNN does not support {', '.join(more)}")
    if spec.symbolic:
        return no("symbolic", "cuDNN needs known sizes")
    return YES


def _types(spec: Spec) -> Verdict:
    kinds = {
        str(jnp.dtype(spec.dtype(n))) for n in spec.operands if n in PLAIN | {"bias"}
    }  # a wider bias would be rounded
    out = spec.param("out_dtype")
    kinds |= {str(jnp.dtype(out))} if out else set()
    wide, values = spec.shape("q")[3], spec.shape("v")[3]
    if wide != values:
        text = f"heads of v are {values} wide, and those of q {wide}: JAX's call"
        return no("width", f"{text} of cuDNN takes equal widths")
    if len(kinds) == 1 and kinds <= set(TYPES):
        return YES
    return no("dtype", f"cuDNN takes one 16-bit float, not {', '.join(sorted(kinds))}")


def _masks(spec: Spec) -> Verdict:
    left, right = spec.param("window", (None, None))
    if left is not None and spec.has("kv_lengths"):
        text = f"lengths of keys and a window of {left} keys before a query"
        return no("window", f"{text} may leave queries without keys")
    if spec.param("softcap") is not None:
        return no("softcap", "cuDNN has no soft cap")
    if (left, right) == (None, None):
        return YES
    if right != 0 or spec.param("shift", 0) != 0 or (left or 0) < 0:
        ends = (spec.param("shift") or 0) + (right or 0)
        where = "nowhere" if right is None else f"{ends} keys after it"
        if left is not None and left < 0:
            where = f"{-left} keys before it at the latest"
        return no("window", f"cuDNN's window ends at the query itself, not {where}")
    if left is not None and spec.shape("q")[1] - left > spec.shape("k")[1]:
        t, s = spec.shape("q")[1], spec.shape("k")[1]
        text = f"a window of {left} keys before each of {t} queries"
        return no("window", f"{text} leaves some of them without any of {s} keys")
    return YES


@functools.lru_cache(maxsize=1024)
def _asked(spec: Spec) -> Verdict:
    """Whether JAX traces the call with its gradients, and its reason if not."""
    arrays = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    params = {n: spec.param(n) for n in ("scale", "window", "empty_rows")}
    b, t, n, _ = spec.shape("q")
    out = jax.ShapeDtypeStruct((b, t, n, spec.shape("v")[3]), spec.dtype("q"))
    try:
        jax.eval_shape(lambda x, c: _vjp(x, **params)[1](c), arrays, out)
    except Exception as problem:  # of many kinds, with the reason in the text
        reason = str(problem).splitlines()[0]
        return no("cudnn", ABSENT if "not detected" in reason else reason)
    return YES


def _vjp(operands: Mapping[str, jax.Array], **params: Any) -> tuple[jax.Array, Any]:
    """The result, and a function that returns cotangents of the floating operands."""
    moving = {n: x for n, x in operands.items() if n in PLAIN | {"bias"}}
    return jax.vjp(lambda some: _attention({**operands, **some}, **params), moving)


def _attention(
    operands: Mapping[str, jax.Array],
    *,
    scale: float,
    window: tuple[int | None, int | None],
    empty_rows: str = "nan",
) -> jax.Array:
    q, k, v = (operands[n] for n in "qkv")
    (b, t), s = q.shape[:2], k.shape[1]
    left, right = window
    more: dict[str, Any] = {}
    lengths = operands.get("kv_lengths")
    tables = {n: operands[n] for n in operands if n in TABLES}
    odd = t % 2 or s % 2
    if lengths is not None or (odd and (tables or right is None or s < t)):
        full = jnp.full((b,), s, jnp.int32)  # hides what is added to make them even
        keys = full if lengths is None else jnp.clip(lengths, 1, s).astype(jnp.int32)
        more["query_seq_lengths"] = jnp.full((b,), t, jnp.int32)
        more["key_value_seq_lengths"] = jnp.broadcast_to(keys, (b,))
    more |= _tables(tables, t, s, q.dtype)
    hides = lengths is not None or bool(tables)
    keep = _keep(operands, window) if hides else None
    out = _call(
        _even(q), _even(k if keep is None else _shown(k, keep)), _even(v),
        scale=scale,
        is_causal=right is not None,
        local_window_size=None if left is None else (left, 0),
        **more,
    )  # fmt: skip
    out = out[:, :t]
    if keep is None:
        return out
    mean = _empty(v, q.shape[2], empty_rows).astype(out.dtype)
    return jnp.where(_seen(keep), out, mean)


def _call(q: jax.Array, k: jax.Array, v: jax.Array, **more: Any) -> jax.Array:
    """CuDNN itself, by JAX."""
    return jax.nn.dot_product_attention(q, k, v, **more, implementation="cudnn")


def _tables(
    tables: Mapping[str, jax.Array], t: int, s: int, dtype: Any
) -> dict[str, jax.Array]:
    """A bias that contains the mask, or only a mask, which needs no gradient."""
    least = jnp.asarray(LARGE.get(str(dtype), LARGEST), dtype)
    whole = lambda x: jnp.broadcast_to(x, (*x.shape[:2], t, s))
    pad = ((0, 0), (0, 0), (0, t % 2), (0, s % 2))
    if "bias" not in tables:
        made = {n: jnp.pad(whole(x), pad, constant_values=True)
                for n, x in tables.items()}  # fmt: skip
        return made
    bias = jnp.maximum(tables["bias"], least)
    if "mask" in tables:
        bias = jnp.where(tables["mask"], bias, least)
    return {"bias": jnp.pad(whole(bias), pad)}


def _keep(
    operands: Mapping[str, jax.Array], window: tuple[int | None, int | None]
) -> jax.Array:
    """The keys that each query sees, bool [b|1, n|1, t, s]."""
    t, s = operands["q"].shape[1], operands["k"].shape[1]
    mask = operands.get("mask")
    if "bias" in operands:
        finite = operands["bias"] > -jnp.inf
        mask = finite if mask is None else mask & finite
    keep = visible(
        t, s, mask=mask, kv_lengths=operands.get("kv_lengths"), window=window
    )
    assert keep is not None
    return jnp.broadcast_to(keep, (*keep.shape[:2], t, s))


def _seen(keep: jax.Array) -> jax.Array:
    """The queries that see a key, bool [b|1, t, n|1, 1]."""
    return keep.any(-1, keepdims=True).transpose(0, 2, 1, 3)


def _shown(k: jax.Array, keep: jax.Array) -> jax.Array:
    """Returns keys with zeros in place of those that no query sees.

    A large number is added to their scores, which does not hide a NaN. Their cotangents
    are zeros, too.
    """
    keys = keep.any(2)
    if keys.shape[1] > 1:
        keys = keys.reshape(keys.shape[0], k.shape[2], -1, k.shape[1]).any(2)
    return jnp.where(keys.swapaxes(1, 2)[..., None], k, 0)


def _empty(v: jax.Array, heads: int, empty_rows: str) -> jax.Array:
    """The result of a query without keys, [b|1, 1, n|1, e|1]."""
    if empty_rows not in AVERAGED:
        value = jnp.nan if empty_rows in NAN else 0.0
        return jnp.full((1, 1, 1, 1), value)
    mean = v.astype(jnp.float32).mean(1, keepdims=True)
    return jnp.repeat(mean, heads // v.shape[2], axis=2)


def _even(x: jax.Array) -> jax.Array:
    """Adds a row to an odd number of rows, for which cuDNN has no gradients."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def _split(
    given: Mapping[str, Any],
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The operands, and the parameters that change a supported use."""
    params = {n: given.get(n, OP.defaults[n]) for n in PARAMS}
    return {n: x for n, x in given.items() if n in OP.names}, params


PARAMS = ("scale", "window", "empty_rows")
"""The parameters that it reads: in supported uses others change nothing."""


def forward(*, residuals: bool = False, **given: Any) -> Any:
    """Returns the result [b, t, n, e], and on request cuDNN's residuals."""
    operands, params = _split(given)
    if not residuals:
        return _attention(operands, **params)
    out, back = _vjp(operands, **params)
    return out, tuple(jax.tree.leaves(back))


def backward(
    *,
    out: None,
    residuals: tuple[jax.Array, ...],
    cotangent: jax.Array,
    **given: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of q, k, v and of a bias."""
    del out
    operands, params = _split(given)
    empty_rows = params["empty_rows"]
    made = jax.eval_shape(lambda x: _vjp(x, **params)[1], operands)
    back = jax.tree.unflatten(jax.tree.structure(made), residuals)
    grads = back(cotangent)[0]
    if empty_rows not in PASSES | NAN or operands.keys() <= PLAIN:
        return grads
    (b, t, n, _), heads = operands["q"].shape, operands["k"].shape[2]
    empty = ~_seen(_keep(operands, params["window"]))[..., 0].swapaxes(1, 2)
    empty = jnp.broadcast_to(empty, (b, n, t))
    if empty_rows in NAN:
        bad = empty.reshape(b, heads, -1).any(-1)[:, None, :, None]
        grads = {**grads, "v": jnp.where(bad, jnp.nan, grads["v"])}
    if empty_rows not in PASSES:
        return grads
    more = passed(operands, params, empty, cotangent)
    return grads | {n: (grads[n] + x).astype(grads[n].dtype) for n, x in more.items()}


KERNEL = Kernel(
    name="cudnn",
    op="attention",
    platforms=("cuda",),
    version=1,
    forward=forward,
    backward=backward,
    limits=Limits(supports, deterministic=deterministic, supports_on=supports_on),
    speed=Speed(
        profitable,
        estimate=estimate,
        margin=margin,
        modelled=modelled,
        temporary=temporary,
    ),
    traits=Traits(
        memory_bounded=True, saves_out=False, exportable=False, needs_devices=True
    ),
)
