"""The pieces of spellings of attention: letters of axes, scores, masks."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings.spelling import collect

SPELLINGS, spelling = collect("attention")

B, T, S, N, K, G, H, E = 2, 24, 40, 6, 3, 2, 8, 10
SCALE = H**-0.5
QKV = dict(q="btnh", k="bsnh", v="bsne")
HEADS_FIRST = dict(q="bnth", k="bnsh", v="bnse")
GROUPED = dict(q="btnh", k="bskh", v="bske")
SQUARE = dict(s=T)
CAUSAL = (None, 0)
ANY = (None, None)
NEGATIVE = float(np.finfo(np.float32).min)
PLAIN = dict(operands="q k v", scale=SCALE)


def dots(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def weigh(p, v):
    return jnp.einsum("bnts,bsne->btne", p, v)


def attend(s, v):
    return weigh(jax.nn.softmax(s, axis=-1), v)


def causal(t=T, s=T):
    return jnp.tril(jnp.ones((t, s), bool))


def masked(s, m=None, fill=-jnp.inf):
    return jnp.where(causal() if m is None else m, s, fill)
