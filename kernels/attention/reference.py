"""Attention written as its formula, with every operand and parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.empty_rows import AVERAGED, NAN, PASSES, PASSING
from rewriter.kernels.attention.overflow import overflows
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.shared.contraction import contraction
from rewriter.kernels.shared.rows import row_max, row_sum
from rewriter.ops.slopes import zero_with_slope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array


def visible(
    t: int,
    s: int,
    *,
    mask: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    prefix: Array | None = None,
    kv_positions: Array | None = None,
    first_position: Array | None = None,
    last_position: Array | None = None,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
) -> Array | None:
    """Returns the keys that each query sees, bool [b|1, n|1, t, s], or None for all.

    Args:
        t: Number of queries.
        s: Number of keys.
        mask: bool [b|1, n|1, t|1, s|1], True keeps.
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s]; a key is seen within its own segment.
        kv_lengths: int [b|1]; keys ``s < length`` are seen.
        offset: int [b|1], added to the query positions.
        prefix: int [b|1]; keys ``s < prefix`` are seen whatever the window.
        kv_positions: int [b|1, s], in any order.
        first_position: int [b|1, t]; keys at positions before it are not seen.
        last_position: int [b|1, t]; those behind it are not.
        window: ``(left, right)``: keys from ``t + offset - left`` up to
            ``t + offset + right`` are seen; None is without limit.
        shift: A static part of ``offset``.
    """
    segments = None
    if q_segments is not None and kv_segments is not None:
        segments = q_segments[:, None, :, None], kv_segments[:, None, None, :]
    places = None
    if kv_positions is not None:
        ends = (
            x if x is None else x[:, None, :, None]
            for x in (first_position, last_position)
        )
        places = kv_positions[:, None, None, :], *ends
    numbers = map(_per_batch, (offset, kv_lengths, prefix))
    seen = Visibility(
        t, s, *window, shift, *numbers, segments=segments, places=places, mask=mask
    )
    return seen.keep(*_places(t, s))


def relative_position(t: int, s: int, offset: Array | None, shift: int) -> Array:
    """Returns ``s - t - offset - shift`` as int [b|1, 1, t, s]."""
    seen = Visibility(t, s, shift=shift, offset=_per_batch(offset))
    return seen.relative(*_places(t, s))


def _places(t: int, s: int) -> tuple[Array, Array]:
    """The numbers of queries and keys, [1, 1, t, 1] and [1, 1, 1, s]."""
    dtype = jax.dtypes.canonicalize_dtype(int)
    return (
        jax.lax.broadcasted_iota(dtype, (1, 1, t, 1), 2),
        jax.lax.broadcasted_iota(dtype, (1, 1, 1, s), 3),
    )


def _per_batch(x: Array | None) -> Array | None:
    return None if x is None else x[:, None, None, None]


def reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    offset: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
    scale_factor: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    unshifted: str | None = None,
    fill: float | None = None,
    fill_passes: bool = False,
    open_bias: bool = False,
    out_dtype: str | None = None,
    weights: str | None = None,
    precision: str | None = None,
    wide: Any = None,
    computed: Callable[[Array], Array] | None = None,
    weighed: Callable[[Array, Array | None], Array] | None = None,
    **hiding: Array | None,
) -> Array:
    """Returns softmax(scale q kᵀ + bias) v over the keys a query sees, [b, t, n, e].

    Operands are documented where the op is declared.

    Args:
        scale: Multiplies the scores.
        window: ``(left, right)`` reach around the query, None without limit;
            causal is ``(None, 0)``.
        shift: A static part of the offset.
        softcap: ``c * tanh(scores / c)``.
        empty_rows: What a row that sees no key gives, and what it passes back to the
            scores: one of the names in `rewriter.kernels.attention.empty_rows`.
        unshifted: The dtype of the program's exponentials, if it takes them of scores
            without their maximum. Rows whose exponentials all vanish, or whose sum
            overflows, are then NaN, and so are their gradients.
        fill: The number that hides keys in the program, if there is one. A row whose
            other scores are as low weighs the keys that the masks hide.
        fill_passes: Whether it is added to the scores of these, which have a gradient
            then; else it is chosen in place of them.
        open_bias: Whether a bias may be as low as it; the result is the same.
        out_dtype: The result's dtype, q's by default.
        weights: Of the last product alone; see `rewriter.kernels.attention.weights`.
        precision: Of all products of float32, as `jax.lax.Precision` by name.
        wide: The dtype of scores and softmax: float32, or float64 as the inputs.
        computed: What the program computes of the scores before it adds the bias, if
            that is more than the above.
        weighed: Makes weights of that and of the keys that are seen, in place of a
            softmax.
        **hiding: The operands that hide keys, as in `visible`.
    """
    del open_bias
    wide = wide or jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    (b, t, n, _), (s, heads, e) = q.shape, v.shape[1:]
    scores = _scores(q, k, scale, scale_factor, softcap, precision, wide)
    if computed is not None:
        scores = computed(scores).astype(wide)
    scores = _biased(scores, bias, alibi, offset, shift)
    keep = visible(t, s, offset=offset, window=window, shift=shift, **hiding)
    if fill is not None and keep is not None:
        hidden = scores + fill if fill_passes else fill
        scores, keep, empty_rows = jnp.where(keep, scores, hidden), None, "nan"
    if weighed is None:
        shares = _shares(scores, keep, sinks, empty_rows, unshifted)
    else:
        shares = weighed(scores, keep)
    if dropout is not None:
        shares = shares * dropout.astype(wide)
    last, v = precision or weights, v.astype(wide)
    if heads == n:  # each query head has keys and values of its own
        out = contraction("bnts,bsne->btne", shares, v, precision=last)
    else:
        shares = shares.reshape(b, heads, n // heads, t, s)
        out = contraction("bkgts,bske->btkge", shares, v, precision=last)
        out = out.reshape(b, t, n, e)
    return out.astype(out_dtype or q.dtype)


def _scores(
    q: Array,
    k: Array,
    scale: float,
    scale_factor: Array | None,
    softcap: float | None,
    precision: str | None,
    wide: Any,
) -> Array:
    """Products of queries with keys, scaled and capped, [b, n, t, s]."""
    (b, t, n, h), (s, heads) = q.shape, k.shape[1:3]
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": wide}
    if heads == n:
        scores = contraction("btnh,bsnh->bnts", q, k, **options)
    else:
        queries = q.reshape(b, t, heads, n // heads, h)
        scores = contraction("btkgh,bskh->bkgts", queries, k, **options)
        scores = scores.reshape(b, n, t, s)
    scores = scores * scale
    if scale_factor is not None:
        scores = scores * scale_factor.astype(wide)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _biased(
    scores: Array,
    bias: Array | None,
    alibi: Array | None,
    offset: Array | None,
    shift: int,
) -> Array:
    """Scores [b, n, t, s] with a bias, and with slopes times relative positions."""
    t, s = scores.shape[2:]
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if alibi is not None:
        relative = relative_position(t, s, offset, shift).astype(scores.dtype)
        scores = scores + alibi.astype(scores.dtype)[:, None, None] * relative
    return scores


def _shares(
    plain: Array,
    keep: Array | None,
    sinks: Array | None,
    empty_rows: str,
    unshifted: str | None,
) -> Array:
    """The softmax of scores over the keys that each query sees.

    Args:
        plain: The scores, [b, n, t, s].
        keep: Which keys a query sees; None for all.
        sinks: The score of each head's sink, [n], if there are sinks.
        empty_rows: As in `reference`.
        unshifted: As in `reference`.
    """
    scores = plain if keep is None else jnp.where(keep, plain, -jnp.inf)
    extra = None if sinks is None else sinks.astype(plain.dtype)[:, None, None]
    shares = _softmax(scores, extra, empty_rows)
    if unshifted is not None:
        total = jax.nn.logsumexp(scores, -1, keepdims=True)
        total = total if extra is None else jnp.logaddexp(total, extra)
        shares = shares * jnp.where(overflows(total, unshifted), jnp.nan, 1)
    if empty_rows in PASSES and extra is None:
        shares = _passing(shares, plain, scores, empty_rows != PASSING)
    return shares


def usual(q: Array, k: Array, v: Array, **given: Any) -> Array:
    """Computes `reference` in the operands' own type throughout.

    Many models do so in 16 bits, with less traffic and more rounding.
    """
    return reference(q, k, v, **given, wide=jnp.result_type(q, k, v))


def _softmax(scores: Array, extra: Array | None, empty_rows: str) -> Array:
    top = row_max(scores)
    if extra is not None:
        top = jnp.maximum(top, extra)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(scores - top)
    total = row_sum(weights)
    if extra is not None:
        total = total + jnp.exp(extra - top)
    if empty_rows in NAN:
        return weights / total
    fill = 1 / scores.shape[-1] if empty_rows in AVERAGED else 0
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fill)


def _passing(weights: Array, plain: Array, scores: Array, breaks: bool) -> Array:
    """Returns weights whose gradient in rows without keys is that of equal scores.

    Args:
        weights: Of `scores`, the same number in such rows.
        plain: The scores before masks.
        scores: Those after.
        breaks: Whether that gradient is NaN.
    """
    empty = row_max(scores) == -jnp.inf
    slopes = jnp.where(empty, jnp.nan if breaks else 1.0, 0.0).astype(plain.dtype)
    moved = zero_with_slope(plain, slopes)
    return weights + (moved - moved.mean(-1, keepdims=True)) / scores.shape[-1]


def sample(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns realistic operands: normal q, k, v, most keys visible.

    Four in five entries of a boolean mask are true. Lengths and prefixes are uniform
    from 1 to s. There are three segments of the same length. An offset puts the last
    query at the last key, and one in ten weights is dropped. Positions are those of
    keys in their order, from the 64th before the query to its own.

    Args:
        key: A PRNG key.
        operands: Shapes and dtypes by operand name.
        params: The op's parameters; unused.
    """
    del params
    s = operands["k"].shape[1]
    result = {}
    for name, x in operands.items():
        key, sub = jax.random.split(key)
        if name == "mask":
            value = jax.random.bernoulli(sub, 0.8, x.shape)
        elif name in ("q_segments", "kv_segments"):
            value = jnp.broadcast_to(jnp.arange(x.shape[-1]) * 3 // s, x.shape)
        elif name in ("kv_lengths", "prefix"):
            value = jax.random.randint(sub, x.shape, 1, s + 1)
        elif name == "offset":
            value = jnp.full(x.shape, max(0, s - operands["q"].shape[1]))
        elif name == "kv_positions":
            value = jnp.broadcast_to(jnp.arange(s), x.shape)
        elif name in ("first_position", "last_position"):
            own = jnp.arange(x.shape[-1]) + max(0, s - x.shape[-1])
            value = own - 64 if name == "first_position" else own
            value = jnp.broadcast_to(value, x.shape)
        elif name == "dropout":
            value = jax.random.bernoulli(sub, 0.9, x.shape) / 0.9
        elif name == "scale_factor":
            value = jnp.ones(x.shape)
        elif name == "alibi":
            value = 2.0 ** -jnp.linspace(1, 8, x.shape[0])
        else:
            value = jax.random.normal(sub, x.shape)
        result[name] = value.astype(x.dtype)
    return result


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw operands, by name, if there are lengths of keys.

    - ``lengths 1 to s``: each sequence has a length chosen evenly at random.
    - ``lengths s``: every sequence has all keys.

    Windows are parameters; each is measured unchanged.
    """
    if "kv_lengths" not in operands:
        return {"": sample}
    return {"lengths 1 to s": sample, "lengths s": _full}


def _full(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    lengths = jnp.full_like(operands["kv_lengths"], operands["k"].shape[1])
    return {**sample(key, operands, params), "kv_lengths": lengths}
