"""Operands cut out of larger arrays, of which others belong to something else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.find.sliced_operands import pieces
from rewriter.program.graph import Graph
from tests.gradients.test_gradients import FORCED, agree
from tests.support.arrays import normal

pytestmark = pytest.mark.once

T, D, H, N, F = 12, 32, 8, 4, 24
CUTS = np.cumsum([N * H, H, H, F])
X = normal(2, T, D)
WIDE = normal(D, N * H + 2 * H + 2 * F, seed=1, size=0.1)
OUT = normal(N * H, D, seed=2, size=0.1)
DOWN = normal(F, D, seed=3, size=0.1)
TABLE = normal(N, 2 * T, 2 * T, seed=4)


def attend(q, k, v, bias=0.0):
    q = q.reshape(2, T, N, H) * H**-0.5
    weights = jax.nn.softmax(jnp.einsum("btnh,bsh->bnts", q, k) + bias)
    return jnp.einsum("bnts,bsh->btnh", weights, v).reshape(2, T, N * H)


def parallel(cut: Callable) -> Callable:
    """Attention and a gated linear unit, side by side, of one projection."""

    def fn(x, wide, out, down):
        q, k, v, gate, up = cut(x @ wide)
        return attend(q, k, v) @ out + (jnp.tanh(gate) + up) @ down

    return fn


def sliced(y):
    edges = [0, *map(int, CUTS), y.shape[-1]]
    return [y[..., a:b] for a, b in itertools.pairwise(edges)]


def shared(x, wide, out, down):
    """Keys are values too."""
    q, k, _, gate, up = jnp.split(x @ wide, CUTS, -1)
    return attend(q, k, k) @ out + (jnp.tanh(gate) + up) @ down


def corner(x, wide, out, down):
    """Of a table of biases only as many rows and columns as there are tokens."""
    q, k, v, gate, up = jnp.split(x @ wide, CUTS, -1)
    bias = (down.sum() * TABLE)[:, :T, :T]
    return attend(q, k, v, bias) @ out + (jnp.tanh(gate) + up) @ down


def relative(x, wide, out, down):
    """Queries meet distances too, in scores that are shifted row by row."""
    q, k, v, gate, up = jnp.split(x @ wide, CUTS, -1)
    q = q.reshape(2, T, N, H)
    far = jnp.einsum("btnh,rh->bntr", q + 0.1, TABLE.reshape(-1, H)[: 2 * T - 1])
    far = far.reshape(2, N, -1)[..., : T * (2 * T - 2)]
    bias = far.reshape(2, N, T, 2 * T - 2)[..., :T]
    return attend(q - 0.1, k, v, bias) @ out + (jnp.tanh(gate) + up) @ down


PROGRAMS = {
    "relative": relative,
    "split": parallel(lambda y: jnp.split(y, CUTS, -1)),
    "slices": parallel(sliced),
    "shared": shared,
    "corner": corner,
}


def step_of(fn: Callable) -> Callable:
    return jax.value_and_grad(lambda *a: (fn(*a) ** 2).mean(), (0, 1, 2, 3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_pieces_are_found(name: str) -> None:
    step, args = step_of(PROGRAMS[name]), (X, WIDE, OUT, DOWN)
    report = rewriter.explain(step)(*args)
    assert not report.failures
    assert report.counts(backward=True)["attention"] == 1
    fast = rewriter.optimize(step, implementation=FORCED)
    assert " exp " not in str(fast.jaxpr(*args))
    agree(fast, step, *args)


def merged(mask: str, halves: bool = False) -> Callable:
    """Heads are counted as sequences before queries are cut out of their array."""

    def fn(y):  # [2, N * 3 * H, T], each head's queries, keys and values together
        y = y.reshape(2 * N, 3 * H, T)
        q, rest = y[:, :H], y[:, H:]
        k, v = jnp.split(rest, 2, 1) if halves else (rest[:, :H], rest[:, H:])
        scores = jnp.einsum("bct,bcs->bts", q * 0.6, k * 0.6)
        if mask == "causal":
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
        if mask == "padding":
            seen = jnp.arange(T) < jnp.repeat(jnp.array([T, 7]), N)[:, None]
            scores = jnp.where(seen[:, None], scores, -1e30)
        out = jnp.einsum("bts,bcs->bct", jax.nn.softmax(scores), v)
        return out.reshape(2, N * H, T)

    return fn


def test_heads_may_be_merged_with_the_batch_before_the_cut() -> None:
    kinds = [merged("no"), merged("causal"), merged("padding"), merged("no", True)]
    kinds += [jax.checkpoint(kinds[0]), jax.vmap(kinds[1])]
    given = [normal(2, 3 * N * H, T, seed=i) for i in range(5)]
    given += [normal(1, 2, 3 * N * H, T, seed=5)]

    def step(given):
        loss = lambda ys: sum(
            jnp.sin(f(y)).sum() for f, y in zip(kinds, ys, strict=True)
        )
        return jax.grad(loss)(given)

    report = rewriter.explain(step)(given)
    assert not report.failures
    assert report.counts(backward=True)["attention"] == len(kinds)
    agree(rewriter.optimize(step, implementation=FORCED), step, given)


def test_a_stopped_piece_has_no_gradient_of_attention() -> None:
    def stopped(x, wide, out, down):
        q, k, v, gate, up = jnp.split(x @ wide, CUTS, -1)
        q = q.reshape(2, T, N, H)
        weights = jax.nn.softmax(jnp.einsum("btnh,bsh->bnts", q, k))
        mixed = jnp.einsum("bnts,bsh->btnh", jax.lax.stop_gradient(weights), v)
        return mixed.reshape(2, T, N * H) @ out + (jnp.tanh(gate) + up) @ down

    step, args = step_of(stopped), (X, WIDE, OUT, DOWN)
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, *args)


def test_a_whole_is_not_cut() -> None:
    """What is read whole, or all of whose pieces are read, is the operand itself."""

    def fn(y, z):
        a, b, c = jnp.split(y, 3, -1)
        return a * b, a * b * c, z[:2] + z[1:3].sum() + z.sum()

    graph = Graph(jax.make_jaxpr(fn)(normal(2, 9), normal(3, 2)))
    y, z = (graph.top.env[v] for v in graph.top.jaxpr.invars)
    (cut,) = (n for n in graph.nodes if n.prim == "split")
    two, three, _ = (graph.top.env[v] for v in graph.top.jaxpr.outvars)
    everything = frozenset(v for n in graph.nodes for v in n.outs)
    assert pieces(graph, [y], {*cut.outs[:2], two}) == frozenset(cut.outs[:2])
    assert not pieces(graph, [y], {*cut.outs, three})
    assert not pieces(graph, [z], everything)


@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_of_values_where_weights_meet_a_loss(layers: int) -> None:
    """Those of queries and keys, cut out of the same array, are not of attention's."""

    def loss(x, wide, out):
        penalty = 0.0
        for w in wide[:layers]:
            q, k, v = (
                y.reshape(2, T, N, H).transpose(0, 2, 1, 3)
                for y in jnp.split(x @ w, 3, -1)
            )
            weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) * H**-0.5)
            mixed = (weights @ v).transpose(0, 2, 1, 3)
            x = x + jnp.tanh(mixed.reshape(2, T, N * H) @ out)
            penalty = penalty + (weights**2).mean()
        return (x**2).mean() + penalty

    step = jax.value_and_grad(loss, (0, 1, 2))
    args = X, normal(3, D, 3 * N * H, seed=6) * 0.3, OUT
    report = rewriter.explain(step)(*args)
    assert not report.failures
    assert report.counts(backward=True)["attention"] == layers
    fast = rewriter.optimize(step, implementation=FORCED)
    agree(fast, step, *args)
