"""Attention of few queries to keys and values of 8 bits on Hopper GPUs.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.empty_rows import AVERAGED, PASSES, ZERO
from rewriter.kernels.attention.hopper_stored.config import (
    LINE,
    ROWS,
    Tiles,
    configs,
    default,
    fits,
    queries,
)
from rewriter.kernels.attention.op import STORED
from rewriter.kernels.attention.stored_form import STEPS
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import SIXTEEN, InFloat32, in_float32
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.stored import EIGHT_BITS
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.kernels.quantized_dot.few_rows.kernel import Use
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

OPERANDS = frozenset({"q", "k", "v", "k_scale", "v_scale", "kv_lengths", "offset"})
"""Supported operands."""

FOUR_BITS = ("int4", "uint4")
"""Dtypes of keys and values of four bits."""

TAKEN = (*EIGHT_BITS, "uint8", *FOUR_BITS)
"""Dtypes of keys and values."""

WIDTHS = (64, 128)
"""Widths of heads."""

BEHIND = "float32 *scale"
"""The steps of numbers whose scales multiply scores and weights."""

BESIDE = 4
"""The heads whose scales a copy brings at once, as it does 16 bytes: scales that lie so
are not transposed first. That took 8 of 85 µs for 4 sequences on an H200."""

XLA = (0.5, 0.235)
"""The share of the bandwidth at which XLA reads one sequence's numbers, and more."""

READ = 0.85
"""That of this kernel. Measured and modelled on an H100, 8 heads of keys, 32 of queries
(``tests/bench/results/quantized_cache_h100.json``; µs)::

    sequences  tokens   as written   this kernel
            1   32768      46   48      42   34
            4   32768     401  383     110  113
           16    4096     207  193      60   61
           64    4096     756  762     215  218

Numbers of four bits take as long as those of a byte to widen: 64 µs for 4 sequences on
an H200, modelled 66.
"""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: few queries, keys and values of 8 bits."""
    if spec.symbolic:
        return SYMBOLIC
    found = [importable("jax.experimental.pallas.mosaic_gpu")]
    if more := ", ".join(sorted(set(spec.operands) - OPERANDS)):
        found.append(no("operands", f"this kernel does not take {more}"))
    if any(0 in shape for _, shape in spec.shapes):
        return no("empty", "an axis has size 0")
    if (dtype := spec.dtype("q")) not in SIXTEEN:
        found.append(no("dtype", f"q is {dtype}, not bfloat16 or float16"))
    out = spec.param("out_dtype") or dtype
    if out not in (dtype, "float32"):
        found.append(no("dtype", f"a result of {out} for q of {dtype}"))
    if (rows := queries(spec)) > ROWS:
        found.append(no("queries", f"{rows} queries of a key head, at most {ROWS}"))
    for name in STEPS:
        found += _numbers(spec, name)
    for name in ("weights", "softcap"):
        if (value := spec.param(name)) is not None:
            found.append(no(name, f"no kernel for {name} {value}"))
    if spec.param("precision") not in (None, "default"):
        found.append(no("precision", f"not {spec.param('precision')}"))
    if spec.param("empty_rows") in PASSES:
        found.append(no("empty_rows", "gradients pass through rows without keys"))
    return all_of(*found)


def _numbers(spec: Spec, name: str) -> list[Verdict]:
    """What hinders keys or values."""
    found = []
    shape, kind, widen = spec.shape(name), spec.dtype(name), spec.param(STEPS[name])
    if kind not in TAKEN or widen is None:
        found.append(no("dtype", f"{name} is {kind}, not {', '.join(TAKEN)}"))
        return found
    if shape[3] not in WIDTHS:
        found.append(no("width", f"heads of {name} are {shape[3]} wide, not 64 or 128"))
    if shape[1] % 8:
        found.append(no("keys", f"{shape[1]} keys, not a multiple of 8"))
    scale = f"{name}_scale"
    if spec.has(scale) and spec.shape(scale)[3] != 1:
        found.append(no("scale", f"a scale of {name} along the width of heads"))
    if widen != BEHIND and in_float32(widen, spec.dtype("q"), kind) is None:
        found.append(no("widen", f"it does not compute the steps {widen!r}"))
    return found


def forward(
    *,
    q: Array,
    k: Array,
    v: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    widen_k: str,
    widen_v: str,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    config: Tiles | None = None,
    swapped: tuple[str, ...] = (),
    **rest: Any,
) -> Array:
    """Returns attention [b, t, n, e], for supported uses.

    Operands are those of the op, and parameters are as in its reference.

    Args:
        config: The tiles; those for few queries if absent.
        swapped: Operands whose heads lie before positions in memory. Both k and v are
            read so if both are among them, without a copy.
        **rest: Parameters that supported uses leave at their defaults.
    """
    from rewriter.kernels.attention.hopper_stored.kernel import Problem, attention
    from rewriter.kernels.quantized_dot.few_rows.kernel import alternating

    del rest
    (b, t, n, _), (_, s, heads, e) = q.shape, v.shape
    group = n // heads
    rows, queries = t * group, -(-t * group // 8) * 8
    config = config or Tiles()
    word = 8 if "int4" in k.dtype.name else 4
    reorders = config.reorders and t == 1
    given: dict[str, Any] = {
        "q": q.reshape(b * heads, group, -1)
        if reorders
        else alternating(_by_pair(q, heads, queries), word)
    }
    axes = "pkzh" if {"k", "v"} <= set(swapped) else "pzkh"
    for name, x in (("k", k), ("v", v)):
        given[name] = x.swapaxes(1, 2) if axes == "pkzh" else x
    if t == 1 and window == (None, None):
        every = jnp.full((b,), s) if kv_lengths is None else kv_lengths
        given["lengths"] = every.astype(jnp.int32)
    else:
        given |= _limits(
            b, t, s, group, queries, window, shift, offset, kv_lengths, empty_rows,
            config.keys,
        )  # fmt: skip
    uses, factors, beside = {}, [], []
    for name, widen, x, own in (("k", widen_k, k, k_scale), ("v", widen_v, v, v_scale)):
        behind = widen == BEHIND
        how = _steps(widen, q.dtype.name, x.dtype.name)
        uses[name] = _use(name, how, q.dtype.name, x, config.keys)
        if own is not None:
            # Where a kernel multiplies by them, 16 bits are read as they are.
            as_is = behind and own.dtype.name in SIXTEEN and not heads % (2 * BESIDE)
            dtype = "float32" if behind else dict(how.dtypes)["scale"]
            dtype = own.dtype.name if as_is else dtype
            wide = jnp.broadcast_to(own.astype(dtype), (b, s, heads, 1))[..., 0]
            if behind and axes == "pzkh" and heads % BESIDE == 0:
                beside.append(f"{name}_scale")
                if config.lines and not s % config.keys and not s * heads % LINE:
                    wide = wide.reshape(b, -1, LINE)
            else:
                wide = wide.swapaxes(1, 2).reshape(b * heads, s)
            given[f"{name}_scale"] = wide
            factors += [name] if behind else []
    out = out_dtype or q.dtype.name
    p = Problem(
        heads, rows, scale, empty_rows in ZERO, axes, uses["k"], uses["v"],
        tuple(factors), tuple(beside), jnp.dtype(out).name, config,
        empty_rows in AVERAGED, word if reorders else 0,
    )  # fmt: skip
    made = attention(p, given).reshape(b, heads, t, group, e)
    return made.transpose(0, 2, 1, 3, 4).reshape(b, t, n, e)


def _steps(widen: str, dtype: str, kind: str) -> InFloat32:
    """The steps that numbers go through before they meet queries of a dtype."""
    if widen == BEHIND:
        how = in_float32(dtype, dtype)
    else:
        how = in_float32(widen, dtype, kind)
    assert how is not None
    return how


def _use(name: str, how: InFloat32, dtype: str, numbers: Array, keys: int) -> Use:
    """How the kernel of few rows would widen keys or values for queries of a dtype."""
    from rewriter.kernels.quantized_dot.few_rows.config import Tiles as OfDot
    from rewriter.kernels.quantized_dot.few_rows.kernel import Use
    from rewriter.kernels.quantized_dot.few_rows.registers import Steps

    steps = tuple((sign, 0 if w == "scale" else w) for sign, w in how.steps)
    kinds = Steps(steps, tuple(d for _, d in how.dtypes), dtype)
    wide, of_keys = numbers.shape[3], name == "k"
    tiles = OfDot(keys, wide) if of_keys else OfDot(wide, keys)
    return Use(
        kinds, (), numbers.dtype.name, "float32", tiles, transposed=of_keys,
        by_rows=not of_keys, alternating=of_keys,
    )  # fmt: skip


def _by_pair(q: Array, heads: int, count: int) -> Array:
    """The queries of each key head, [b * heads, count, h], padded with zeros."""
    b, t, n, h = q.shape
    x = q.reshape(b, t, heads, n // heads, h).transpose(0, 2, 1, 3, 4)
    x = x.reshape(b * heads, -1, h)
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1]), (0, 0)))


def _limits(
    b: int, t: int, s: int, group: int, count: int, window: Any, shift: int,
    offset: Array | None, lengths: Array | None, empty_rows: str, keys: int,
) -> dict[str, Array]:  # fmt: skip
    """``limits`` of `kernel.attention`."""
    at = jnp.arange(t, dtype=jnp.int32)[None] + shift
    at = at if offset is None else at + offset.astype(jnp.int32)[:, None]
    see = Visibility(t, s, *window)
    end = s if lengths is None else lengths.astype(jnp.int32)[:, None]
    last = jnp.minimum(end, s) - 1
    if window[1] is not None:
        last = jnp.minimum(see.last(at), last)
    first = jnp.maximum(see.first(at), 0) if window[0] is not None else 0
    first, last = (
        jnp.broadcast_to(jnp.asarray(x, jnp.int32), (b, t)) for x in (first, last)
    )
    same = jnp.zeros((b, t), bool)
    if empty_rows in AVERAGED:
        same = first > last
        first, last = jnp.where(same, 0, first), jnp.where(same, s - 1, last)
    low = jnp.clip(first.min(1) // keys, 0, -(-s // keys))
    high = jnp.clip(last.max(1) // keys + 1, low, -(-s // keys))
    each = [jnp.repeat(x.astype(jnp.int32), group, 1) for x in (first, last, same)]
    fill = ((0, 0), (0, count - t * group))
    padded = [
        jnp.pad(x, fill, constant_values=c)
        for x, c in zip(each, (0, -1, 0), strict=True)
    ]
    return {"limits": jnp.concatenate([*padded, low[:, None], high[:, None]], 1)}


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of the kernels, from reading the numbers.

    The kernel that widens tile by tile was not measured on a GPU.
    """
    (b, s, heads, h), e = spec.shape("k"), spec.shape("v")[3]
    read = float(b * s * heads * (h + e))
    xla = seconds(device, 0.0, read, memory=XLA[b > 1])
    rest = 0.0 if passes == "forward" else xla
    own = seconds(device, 0.0, read, memory=READ, launches=2)
    return {"xla": xla + rest, "memory_bounded": 2 * xla + rest, "hopper": own + rest}


KERNEL = HOPPER.kernel(
    STORED.name, forward, None, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate),
    Space(Tiles, default, configs, fits), swaps=(("k", 1, 2), ("v", 1, 2)), version=2,
)  # fmt: skip
