"""Attention programs: of random masks, and of operands by random arithmetic."""

from __future__ import annotations

import dataclasses

from tests.soundness import masks, operands, scores
from tests.soundness.masks import Sizes
from tests.soundness.program import Program
from tests.soundness.scores import Operands
from tests.soundness.writer import Writer

BAD_KEYS = ("some nan or inf", "some inf", "some 1e30 or 1e-30", "some nan")


def of_masks(seed: int) -> Program:
    """Attention whose result is its weights, under a random mask."""
    w = Writer("mask", seed)
    size = scores.sizes(w)
    recipes = {"v": "identity"}
    if w.chance(0.15):
        recipes[w.one(("k", "v"))] = w.one(BAD_KEYS)
    library = w.chance(0.1)
    widths = (size.keys if library else 8, size.keys)
    given = scores.given(w, size, widths, recipes)
    mask = masks.mask(w, size, w.one((0, 1, 1, 2)))
    if library:
        return w.program(_library(w, given, mask, size), entries=True)
    score = scores.scores(w, given)
    score = scores.masked(w, score, mask)
    weights = scores.weights(w, score, mask)
    return w.program(scores.weighed(w, weights, given), entries=True)


def _library(w: Writer, given: Operands, mask: str, size: Sizes) -> str:
    """JAX's own attention."""
    shape = (size.batch, size.heads, size.queries, size.keys)
    full = f"jnp.broadcast_to({mask}, {shape})"
    call = f"jax.nn.dot_product_attention({given.q}, {given.k}, {given.v}, mask={full})"
    return w.let(call, "o")


def of_operands(seed: int) -> Program:
    """Attention of operands that are computed."""
    w = Writer("operand", seed)
    size = scores.sizes(w)
    where = w.usually(
        ("q", "k", "v", "bias", "bias", "bias", "k, v"), ("scores", "weights"), 0.2
    )
    named = [n for n in ("q", "k", "v") if n in where.split(", ")]
    given = scores.given(w, size, (8, 8), {n: operands.values(w) for n in named})
    given = dataclasses.replace(
        given, **{n: operands.changed(w, n, axes=(-1, 1)) for n in named}
    )
    score = scores.scores(w, given)
    if where == "bias":
        score = w.let(f"{score} + {_bias(w, size)}", "s")
    if where == "scores":
        score = w.let(w.one(scores.GUARDS).format(s=score), "s")
    mask = _usual_mask(w, size)
    score = scores.masked(w, score, mask) if mask else score
    weights = scores.weights(w, score, mask)
    if where == "weights":
        weights = w.let(w.one(scores.SELF).format(w=weights), "w")
    return w.program(scores.weighed(w, weights, given))


def _usual_mask(w: Writer, size: Sizes) -> str | None:
    """No mask, a causal one, or any."""
    return w.branch(
        lambda: None,
        lambda: masks.causal(w, size),
        lambda: masks.mask(w, size, 0),
    )


def _bias(w: Writer, size: Sizes) -> str:
    """An addend of scores, of some of their axes."""
    values = operands.values(w)
    if w.chance(0.3):
        shape = (size.batch, size.heads, size.queries, size.keys)
        z = w.argument("z", shape, values, operand=True)
        return operands.changed(w, z, axes=(-1, -2))
    z = w.argument("z", (size.batch, size.keys), values, operand=True)
    z = operands.changed(w, z)
    if size.queries == size.keys and w.chance(0.3):
        return f"({z}[:, None, :, None] - {z}[:, None, None, :])"
    return f"{z}[:, None, None, :]"
