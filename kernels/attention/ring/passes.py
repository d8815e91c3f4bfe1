"""Forward and backward passes of ring attention on one device.

These run on each device of a `jax.shard_map`. The keys of the next turn are being sent
while those of this turn are used, and no more than these two parts are held at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import PASSES, passed
from rewriter.kernels.attention.ring.empty_rows import filled, given_back, may_be_empty
from rewriter.kernels.attention.ring.turns import Seen, Turn, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax import Array

    Operands = Mapping[str, Array]
    Params = Mapping[str, Any]

PASSED = ("k", "v", "kv_segments")
"""The operands that have an axis of keys."""


def forward(
    operands: Operands,
    params: Params,
    axes: tuple[str, ...],
    count: int,
    compute: Callable[[Operands, Params], tuple[Array, Sequence[Array]]],
) -> tuple[Array, Array]:
    """Returns attention of this device's queries to the keys of all, and log-sum-exps.

    Args:
        operands: This device's part of q [b, t, n, h], k [b, s, k, h], v [b, s, k, e]
            and of segments; kv_lengths count the keys of all devices.
        params: The op's parameters for the whole.
        axes: The mesh axes over which queries and keys are split.
        count: The number of parts.
        compute: ``compute(operands, params)`` gives attention to one part of the keys,
            and arrays whose sum is the log-sum-exp of each row, -inf where no key is
            seen: [b, n, t], with axes of size 1 between.

    Returns:
        [b, t, n, e] and [b, n, t], -inf in rows without keys.
    """
    index, ahead = lax.axis_index(axes), turns_of(operands, params, count)
    here = _passed(operands)
    wide = jnp.promote_types(jnp.result_type(*(operands[x] for x in "qkv")), "float32")
    dtype, state = jnp.dtype(params["out_dtype"] or operands["q"].dtype), None
    for i, turn in enumerate(ahead):
        coming = here
        if i + 1 < len(ahead):
            by = ahead[i + 1].distance - turn.distance
            coming = _sent(here, axes, count, by)
        given = _block(operands, here, turn, index, count)

        def attended(seen: Seen, state: Any, given: Operands = given) -> Any:
            out, saved = compute(given, _params(params, seen))
            rows = out.shape[0], out.shape[2], out.shape[1]
            new = out.astype(wide), sum(x.reshape(rows) for x in saved)
            return new if state is None else merged(state, new)

        state = _where_seen(turn, index, attended, state)
        here, state = lax.optimization_barrier((coming, state))
    assert state is not None
    out, lse = state
    if may_be_empty(operands, params):
        out = filled(out, lse, operands["v"], params, axes)
    return out.astype(dtype), lse


def backward(
    operands: Operands,
    params: Params,
    out: Array,
    lse: Array,
    cotangent: Array,
    axes: tuple[str, ...],
    count: int,
    compute: Callable[..., Mapping[str, Array]],
) -> dict[str, Array]:
    """Returns the cotangents of this device's part of q, k and v.

    Those of k and v go around with k and v, and end where these began.

    Args:
        operands: As for `forward`.
        params: As for `forward`.
        out: [b, t, n, e], from `forward`.
        lse: [b, n, t], from `forward`.
        cotangent: [b, t, n, e].
        axes: As for `forward`.
        count: As for `forward`.
        compute: ``compute(operands, params, out, lse, cotangent)`` returns one part's
            contribution to the cotangent of q, and the cotangents of k and v.
    """
    index, ahead = lax.axis_index(axes), turns_of(operands, params, count)
    here = _passed(operands)

    def part(seen: Seen, given: Operands) -> tuple[Array, Array, Array]:
        grads = compute(given, _params(params, seen), out, lse, cotangent)
        return grads["q"].astype(lse.dtype), grads["k"], grads["v"]

    if len(ahead) > 1:
        here = _sent(here, axes, count, ahead[1].distance)
    assert ahead[0].before is not None
    given = _block(operands, _passed(operands), ahead[0], index, count)
    dq, *own = part(ahead[0].before, given)
    here, dq, own = lax.optimization_barrier((here, dq, own))
    grads = [jnp.where(index < 0, x, 0) for x in own]  # 0, varying like them
    for i, turn in enumerate(ahead[1:], 1):
        last = i + 1 == len(ahead)
        by = (count if last else ahead[i + 1].distance) - turn.distance
        coming = here if last else _sent(here, axes, count, by)
        given = _block(operands, here, turn, index, count)

        def added(seen: Seen, state: Any, given: Operands = given) -> Any:
            return jax.tree.map(jnp.add, state, part(seen, given))

        dq, *grads = _where_seen(turn, index, added, (dq, *grads))
        grads = _sent(grads, axes, count, by)
        here, dq, grads = lax.optimization_barrier((coming, dq, grads))
    dk, dv = jax.tree.map(jnp.add, own, grads)
    if may_be_empty(operands, params):
        dv = given_back(dv, lse, cotangent, params, axes, count)
        if params["empty_rows"] in PASSES:
            summed = lambda x: lax.psum(x, axes)
            empty = lse == -jnp.inf
            more = passed(operands, params, empty, cotangent, summed, count)
            dq, dk = dq + more["q"], (dk + more["k"]).astype(dk.dtype)
    return {"q": dq.astype(operands["q"].dtype), "k": dk, "v": dv}


def turns_of(operands: Operands, params: Params, count: int) -> tuple[Turn, ...]:
    """Returns the turns of a use with these parts."""
    size = operands["q"].shape[1]
    return turns(params["window"], params["shift"], size, count)


def merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merges attention to two sets of keys.

    Args:
        one: The result [b, t, n, e] and the log-sum-exp [b, n, t] of each row.
        other: The same for the other keys.
    """
    (out, lse), (more, its) = one, other
    top = jnp.maximum(lse, its)
    top = jnp.where(top == -jnp.inf, 0, top)
    first, second = jnp.exp(lse - top), jnp.exp(its - top)
    total = first + second
    share = first / jnp.where(total == 0, 1, total)

    def along(x: Array) -> Array:
        return x.swapaxes(1, 2)[..., None].astype(out.dtype)

    out = more + along(share) * (out - more)
    return out, top + jnp.log(total)


def _where_seen(turn: Turn, index: Array, see: Any, state: Any) -> Any:
    """The state after a turn; some devices may see no key in it."""
    if turn.before == turn.around or not turn.distance:
        return see(turn.before, state)

    def branch(seen: Seen | None) -> Any:
        return lambda state: state if seen is None else see(seen, state)

    ahead = index >= turn.distance
    return lax.cond(ahead, branch(turn.before), branch(turn.around), state)


def _passed(operands: Operands) -> dict[str, Array]:
    return {name: operands[name] for name in PASSED if name in operands}


def _block(
    operands: Operands, here: Operands, turn: Turn, index: Array, count: int
) -> dict[str, Array]:
    """The operands with the keys of a turn, and the number of visible ones."""
    given = {**operands, **here}
    if "kv_lengths" in given:
        size = given["k"].shape[1]
        first = (index - turn.distance) % count * size
        lengths = given["kv_lengths"]
        given["kv_lengths"] = jnp.clip(lengths - first.astype(lengths.dtype), 0, size)
    return given


def _params(params: Params, seen: Seen) -> dict[str, Any]:
    return {
        **params, "window": seen.window, "shift": seen.shift, "empty_rows": "zero",
        "fill": None,
    }  # fmt: skip


def _sent(tree: Any, axes: tuple[str, ...], count: int, by: int) -> Any:
    """Sends each device's arrays to the device a number of places behind it."""
    to = [(i, (i + by) % count) for i in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, to), tree)
