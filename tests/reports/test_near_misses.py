"""What is a near miss to a reader, and what only shares a few steps with an op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rewriter

pytestmark = pytest.mark.once

rng = np.random.default_rng(0)
X = rng.normal(size=(4, 8)).astype("f4")
W = rng.normal(size=(8, 6)).astype("f4")
U = rng.normal(size=(8, 6)).astype("f4")
WIDE = rng.normal(size=(4, 5)).astype("f4")
Q, K, V = (rng.normal(size=(2, 6, 2, 4)).astype("f4") for _ in range(3))
KEY = jax.random.key(0)


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def dispatch(x, w):
    chances, chosen = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
    return jnp.einsum("nke,nd,nk->ekd", jax.nn.one_hot(chosen, 6), x, chances)


def entropy(x):
    p = jax.nn.softmax(x)
    return -(p * jnp.log(p)).sum(-1)


def divergence(x):
    logs = jax.nn.log_softmax(x) - jax.nn.log_softmax(x + 1)
    return (jax.nn.softmax(x) * logs).sum()


def distillation(x, w):
    teacher = jax.nn.softmax(x[:, :6])
    return (teacher * (jnp.log(teacher) - jax.nn.log_softmax(x @ w))).sum(-1).mean()


def l2_norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def adam(x):
    return 0.9 * x / (jnp.sqrt(0.99 * x * x) + 1e-8)


def clipped(x):
    return x * jnp.minimum(1.0, 1 / (jnp.sqrt((x * x).sum()) + 1e-6))


def mlp(x, w):
    return jax.nn.relu(x @ w) @ w.T


def cell(x, w):
    return jax.nn.sigmoid(x @ w) * jnp.tanh(x @ w) + jax.nn.sigmoid(x @ w)


def dropout_behind_gelu(x, w, key):
    return dropout(jax.nn.gelu(x @ w, approximate=False), key) @ w.T


def dropout_behind_silu(x, w, key):
    return dropout(jax.nn.silu(x @ w), key) @ w.T


def global_norm(x, w):
    grads = jax.tree.leaves((x * 2, w * 3))
    total = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return jnp.where(total < 1, grads[0], grads[0] / total)


def auxiliary_loss(x, w):
    chances = jax.nn.softmax(x @ w)
    hits = jax.nn.one_hot(jnp.argmax(chances, -1), 6)
    return (hits.mean(0) * chances.mean(0)).sum() * 6


def causal_log_sum_exp(q, k):
    seen = np.tril(np.ones((6, 6), bool))
    scores = jnp.where(seen, jnp.einsum("btnh,bsnh->bnts", q, k), -jnp.inf)
    return jax.nn.logsumexp(scores, -1)


def free_energy(x, w):
    return jax.nn.logsumexp(jnp.where(np.arange(6) < 4, x @ w, -1e30), -1)


def weight_norm(x, w):
    """A weight of any length, as wav2vec 2.0 has it in its convolutions."""
    return x @ (w / jnp.linalg.norm(w, axis=0, keepdims=True) * LENGTHS)


LENGTHS = np.linspace(0.5, 2.0, 6).astype("f4")
NONE = {
    "weight_norm": (weight_norm, X, W),
    "dropout_behind_gelu": (dropout_behind_gelu, X, W, KEY),
    "dropout_behind_silu": (dropout_behind_silu, X, W, KEY),
    "global_norm": (global_norm, X, W),
    "auxiliary_loss": (auxiliary_loss, X, W),
    "dropout": (dropout, X, KEY),
    "log_softmax": (jax.nn.log_softmax, X),
    "softmax": (jax.nn.softmax, X),
    "dispatch": (dispatch, X, W),
    "entropy": (entropy, X),
    "divergence": (divergence, X),
    "distillation": (distillation, X, W),
    "adam": (adam, X),
    "clipped": (clipped, X),
    "mlp": (mlp, X, W),
    "log_of_a_layer": (lambda x, w, u: jnp.log(jax.nn.softmax(x @ w)) @ u.T, X, W, U),
    "bounded_root": (lambda x: x / jnp.maximum(jnp.sqrt(jnp.abs(x)), 1e-3), X),
    "cell": (cell, X, W),
}


@pytest.mark.parametrize("name", NONE)
def test_no_near_miss(name):
    fn, *args = NONE[name]
    report = rewriter.explain(fn)(*args)
    assert not report.misses
    assert not report.sites


@pytest.mark.parametrize("name", NONE)
def test_no_near_miss_in_gradients(name):
    fn, *args = NONE[name]
    floats = tuple(k for k, a in enumerate(args) if a.dtype == np.float32)
    gradient = jax.grad(lambda *args: fn(*args).sum(), floats)
    report = rewriter.explain(gradient)(*args)
    assert not report.misses
    assert not report.sites


def attention_with_its_log_sum_exp(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)


@pytest.mark.parametrize(
    ("fn", "args", "ops"),
    [
        (causal_log_sum_exp, (Q, K), []),
        (free_energy, (X, W), []),
        (attention_with_its_log_sum_exp, (Q, K, V), ["attention"]),
    ],
)
def test_a_log_sum_exp_without_a_label_is_near_no_loss(fn, args, ops):
    report = rewriter.explain(fn)(*args)
    assert [s.op for s in report.sites] == ops
    assert not report.misses


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5


def weighted(w, v):
    return jnp.einsum("bnts,bsnh->btnh", w, v)


def over_queries(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=-2), v)


def root_plus_epsilon(x):
    return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6)


def deviation_plus_epsilon(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)


def larger_of_two(x):
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-6))


def unlike_branches(x, w, u):
    return jax.nn.silu(x @ w) * (x @ u + jnp.sin(x @ u))


def both_branches(x, w, u):
    return jax.nn.silu(x @ w) * jnp.tanh(x @ u)


def sigmoid_and_gelu(x, w, u):
    return jax.nn.gelu(x @ w) * jax.nn.sigmoid(x @ u)


def batch_norm(x, scale):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) * scale


def largest_keys(q, k, v):
    s = scores(q, k)
    least = jax.lax.top_k(s, 3)[0][..., -1:]
    return weighted(jax.nn.softmax(jnp.where(s >= least, s, -jnp.inf)), v)


def renormalised(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    w = jnp.where(w > 0.1, w, 0.0)
    return weighted(w / w.sum(-1, keepdims=True), v)


def chosen(x, w):
    chances, at = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
    return (jax.nn.one_hot(at, 6) * chances[..., None]).sum(1)


def all_experts(x, w, up, down):
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, up))
    return jnp.einsum("tef,efd,te->td", h, down, chosen(x, w))


def capacity(x, w, up, down):
    chances = jax.nn.softmax(x @ w)
    hit = jax.nn.one_hot(chances.argmax(-1), 6)
    place = ((jnp.cumsum(hit, 0) * hit).max(-1) - 1).astype(int)
    sent = hit[..., None] * jax.nn.one_hot(place, 4)[:, None]
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", sent, x), up))
    return jnp.einsum("tec,ecd->td", sent, jnp.einsum("ecf,efd->ecd", h, down))


UP = rng.normal(size=(6, 8, 5)).astype("f4")
DOWN = rng.normal(size=(6, 5, 8)).astype("f4")
NEAR = {
    "both": ("gated_linear_unit", "both branches", both_branches, X, W, U),
    "both sigmoid": ("gated_linear_unit", "both branches", sigmoid_and_gelu, X, W, U),
    "batch_norm": ("group_norm", "batch norm", batch_norm, X, X[0]),
    "largest": ("attention", "computed from the scores", largest_keys, Q, K, V),
    "renormalised": ("attention", "computed from the scores", renormalised, Q, K, V),
    "all_experts": ("ragged_dot", "all 6 experts", all_experts, X, W, UP, DOWN),
    "capacity": ("ragged_dot", "one-hot contractions", capacity, X, W, UP, DOWN),
    "over_queries": ("attention", "summed along another", over_queries, Q, K, V),
    "root": ("rms_norm", "added to the root", root_plus_epsilon, X),
    "deviation": ("layer_norm", "added to the root", deviation_plus_epsilon, X),
    "larger": ("rms_norm", "and not their sum", larger_of_two, X),
    "l2_norm": ("rms_norm", "an L2 norm", l2_norm, X),
    "branches": ("gated_linear_unit", "product is added", unlike_branches, X, W, U),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_with_its_reason(name):
    op, words, fn, *args = NEAR[name]
    report = rewriter.explain(fn)(*args)
    assert [m.op for m in report.misses] == [op]
    assert words in report.misses[0].reasons[0].text
    assert not report.sites


@pytest.mark.parametrize("name", ["over_queries", "both", "all_experts", "batch_norm"])
def test_a_near_miss_is_that_of_the_forward_pass_in_gradients(name):
    op, words, fn, *args = NEAR[name]
    report = rewriter.explain(jax.grad(lambda *a: (fn(*a) ** 2).sum()))(*args)
    assert [m.op for m in report.misses] == [op]
    assert words in report.misses[0].reasons[0].text


def bilinear(x, w, u):
    return (x @ w) * (x @ u)


def two_inputs(x, y, w, u):
    return jax.nn.silu(x @ w) * (y @ u)


def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    sums = jnp.einsum("bsnh,bsnd->bnhd", k, v)
    total = jnp.einsum("btnh,bnh->btn", q, k.sum(1))
    return jnp.einsum("btnh,bnhd->btnd", q, sums) / total[..., None]


def expert_scan(x, w, up, down):
    def one(out, expert):
        first, second, weight = expert
        return out + jax.nn.relu(x @ first) @ second * weight[:, None], None

    return jax.lax.scan(one, jnp.zeros_like(x), (up, down, chosen(x, w).T))[0]


def clipped_weights(q, k, v):
    return weighted(jnp.clip(1.1 * jax.nn.softmax(scores(q, k)) - 0.05, 0, 1), v)


def expert_loop(x, w, up, down):
    weights, out = chosen(x, w), 0
    for e in range(6):
        out += jax.nn.relu(x @ up[e]) @ down[e] * weights[:, e : e + 1]
    return out


LABELS = np.asarray([0, 3, 5, 1])


def log_of_picked(x, w):
    p = jax.nn.softmax(x @ w)
    return -jnp.log(jnp.take_along_axis(p, LABELS[:, None], 1)).mean()


def log_of_bounded(x, w):
    logs = jnp.log(jnp.clip(jax.nn.softmax(x @ w), 1e-7, 1 - 1e-7))
    return -(jax.nn.one_hot(LABELS, 6) * logs).sum(-1).mean()


def distances(q, k, v):
    apart = jnp.square(q[:, :, None] - k[:, None]).sum(-1)
    return weighted(jax.nn.softmax(-apart.transpose(0, 3, 1, 2)), v)


def gathered_matrices(x, w, up, down):
    return jnp.einsum("td,tdf->tf", jnp.tile(x, (2, 1)), up[jnp.arange(8) % 6])


def masked_experts(x, w, up, down):
    expert = jnp.arange(4) % 3
    return sum(jnp.where((expert == k)[:, None], x @ up[k], 0) for k in range(3))


def masked_expert_scan(x, w, up, down):
    expert = jnp.arange(4) % 3

    def body(total, step):
        k, matrix = step
        return total + jnp.where((expert == k)[:, None], x @ matrix, 0), None

    return jax.lax.scan(body, jnp.zeros((4, 5)), (jnp.arange(6), up))[0]


def differences(q, k, v):
    apart = jnp.abs(q[:, :, None] - k[:, None]).sum(-1)
    return weighted(jax.nn.softmax(-apart.transpose(0, 3, 1, 2)), v)


def additive(q, k, v):
    """Bahdanau's scores: one vector weighs the sums of queries and keys."""
    both = jnp.tanh(q[:, :, None] + k[:, None]) * X[0, :4]
    weights = jax.nn.softmax(both.sum(-1), 2)
    return jnp.einsum("btsn,bsnh->btnh", weights, v)


def additive_by_sum(q, k, v):
    both = jax.nn.sigmoid(q[:, None] + k[:, :, None]) * q[0, 0, 0]
    return weighted(jax.nn.softmax(both.sum(-1).transpose(0, 3, 2, 1)), v)


WORDS = {
    "log_of_picked": ("cross_entropy", "rounds to 0", log_of_picked, X, W),
    "log_of_bounded": ("cross_entropy", "rounds to 0", log_of_bounded, X, W),
    "bilinear": ("gated_linear_unit", "a bilinear unit", bilinear, X, W, U),
    "two_inputs": ("gated_linear_unit", "different arrays", two_inputs, X, X + 1, W, U),
    "linear": ("attention", "linear attention", linear_attention, Q, K, V),
    "rounded": (
        "attention", "go through round",
        lambda q, k, v: weighted(jnp.round(127 * jax.nn.softmax(scores(q, k))), v),
        Q, K, V,
    ),
    "bounded": (
        "rms_norm", "bounded from below",
        lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6), X,
    ),
    "clipped": ("attention", "go through max", clipped_weights, Q, K, V),
    "scan": ("ragged_dot", "one after another", expert_scan, X, W, UP, DOWN),
    "loop": ("ragged_dot", "one after another", expert_loop, X, W, UP, DOWN),
    "masked": ("ragged_dot", "one after another", masked_experts, X, W, UP, DOWN),
    "masked scan": (
        "ragged_dot", "one after another", masked_expert_scan, X, W, UP, DOWN
    ),
    "gathered": ("ragged_dot", "for each row", gathered_matrices, X, W, UP, DOWN),
    "distances": ("attention", "2 q·k - |k|²", distances, Q, K, V),
    "differences": ("attention", "and no product", differences, Q, K, V),
    "additive": ("attention", "additive attention", additive, Q, K, V),
    "additive by sum": ("attention", "additive attention", additive_by_sum, Q, K, V),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_words_where_one_might_expect_a_site(name):
    op, words, fn, *args = WORDS[name]
    report = rewriter.explain(fn)(*args)
    assert not report.misses
    assert not report.sites
    for text in (report.text(), report.why_not(), report.why_not(op)):
        assert words in text
        assert "test_near_misses.py" in text
    others = {"attention", "gated_linear_unit", "ragged_dot", "rms_norm"} - {op}
    assert not any(words in report.why_not(other) for other in others)


@pytest.mark.parametrize("name", NONE)
def test_no_words_where_nothing_is_expected(name):
    fn, *args = NONE[name]
    assert not rewriter.explain(fn)(*args).look_alikes()


# ------------------------------------------------------- what only looks like an op

WEIGH = np.asarray([[1.0, 0.3], [0.2, 1.0]], "f4")
LABELS = np.asarray([0, 3, 5, 1], "i4")


def over_queries_too(q, k, v):
    s = scores(q, k)
    return weighted(jax.nn.softmax(s.reshape(2, 2, -1)).reshape(s.shape), v)


def mixed_heads(q, k, v):
    w = jax.nn.softmax(jnp.einsum("bnts,nm->bmts", scores(q, k), WEIGH))
    return weighted(jnp.einsum("bnts,nm->bmts", w, WEIGH), v)


def divided_again(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return weighted(w / w.sum(-2, keepdims=True), v)


def root_of_the_mean(x):
    root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) * root


def two_kinds_of_weights(q, k, v):
    s = scores(q, k)
    return weighted(jax.nn.softmax(s) + jax.nn.relu(s) / 6, v)


def sparse(q, k, v):
    """Weights of a threshold that depends on all scores of the row."""
    s = scores(q, k)
    largest = jnp.sort(s)[..., ::-1]
    sums = jnp.cumsum(largest, -1) - 1
    count = (largest > sums / jnp.arange(1, 7)).sum(-1, keepdims=True)
    least = jnp.take_along_axis(sums, count - 1, -1) / count
    return weighted(jnp.maximum(s - least, 0), v)


def straight_through(q, k, v):
    soft = jax.nn.softmax(scores(q, k) / 0.5)
    hard = jax.nn.one_hot(soft.argmax(-1), 6)
    return weighted(hard + soft - jax.lax.stop_gradient(soft), v)


def random_features(q, k, v):
    q, k = (jnp.exp(x @ WIDE - (x * x).sum(-1, keepdims=True) / 2) for x in (q, k))
    sums = jnp.einsum("bsnr,bsnh->bnrh", k, v)
    total = jnp.einsum("btnr,bnr->btn", q, k.sum(1))
    return jnp.einsum("btnr,bnrh->btnh", q, sums) / total[..., None]


def slots(q, k, v):
    weights = jax.nn.softmax(scores(q, k), -2) + 1e-8
    return weighted(weights / weights.sum(-1, keepdims=True), v)


def largest_alone(q, k, v):
    s = scores(q, k)
    chosen = s == s.max(-1, keepdims=True)
    return weighted(jnp.where(chosen, jax.nn.softmax(s), 0), v)


def weights_times_logs(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return weighted(-w * jnp.log(w + 1e-9), v)


def both_neighbours(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return weighted((w + jnp.roll(w, 1, -1)) / 2, v)


def distilled(x, w, u):
    return -(jax.nn.softmax(x @ w) * jax.nn.log_softmax(x @ u)).sum(-1).mean()


def additive(x, w, u, adjacent):
    """A layer of a graph attention network."""
    h = x @ w
    e = jax.nn.leaky_relu((h @ u)[:, :1] + (h @ u)[:, 1:2].T)
    return jax.nn.softmax(jnp.where(adjacent, e, -1e9)) @ h


def epsilon_in_the_sum(q, k, v):
    s = scores(q, k)
    weights = jnp.exp(s - s.max(-1, keepdims=True))
    return weighted(weights / (weights.sum(-1, keepdims=True) + 1e-6), v)


REASONS = {
    "additive": (
        "attention", "as in additive attention", additive,
        X, W, W.T.copy(), np.tri(4, dtype=bool),
    ),
    "softmax_twice": (
        "attention", "a softmax of their own",
        lambda q, k, v: weighted(jax.nn.softmax(jax.nn.softmax(scores(q, k))), v),
        Q, K, V,
    ),
    "rolled": (
        "attention", "are moved along the keys",
        lambda q, k, v: weighted(jnp.roll(jax.nn.softmax(scores(q, k)), 1, -1), v),
        Q, K, V,
    ),
    "epsilon_in_the_sum": (
        "attention", "as an epsilon does", epsilon_in_the_sum, Q, K, V
    ),
    "gate_of_heads": (
        "attention", "an array that has no axis of keys",
        lambda q, k, v, g: weighted(jax.nn.softmax(scores(q, k)) * g, v),
        Q, K, V, np.ones((2, 1, 1), "f4"),
    ),
    "one_class": (
        "cross_entropy", "one class as their label",
        lambda x, w, u: -jax.nn.log_softmax(
            jnp.concatenate([(x * w[:, LABELS].T).sum(-1, keepdims=True), x @ u], -1)
        )[:, 0].mean(),
        X, W, U,
    ),
    "weights_times_logs": (
        "attention", "a function of the weights", weights_times_logs, Q, K, V
    ),
    "both_neighbours": (
        "attention", "are moved along the keys", both_neighbours, Q, K, V
    ),
    "distilled": ("cross_entropy", "no labels", distilled, X, W, U),
    "straight_through": (
        "attention", "and only one is a softmax", straight_through, Q, K, V
    ),
    "random_features": (
        "attention", "as in linear attention", random_features, Q, K, V
    ),
    "slots": ("attention", "divided by a sum of them again", slots, Q, K, V),
    "largest_alone": ("attention", "choice of weights to drop", largest_alone, Q, K, V),
    "shifted_root": (
        "rms_norm", "of another array than it divides",
        lambda x: x / jnp.sqrt(((x + 1e-3) ** 2).mean(-1, keepdims=True)), X,
    ),
    "sparsemax": ("scored_attention", "sparsemax and entmax", sparse, Q, K, V),
    "returned weights": (
        "scored_attention", "are a result too",
        lambda q, k, v: (lambda p: (p, weighted(p, v)))(jax.nn.sigmoid(scores(q, k))),
        Q, K, V,
    ),
    "linear attention": (
        "scored_attention", "linear attention",
        lambda q, k, v: weighted(scores(q, k) / 6, v), Q, K, V,
    ),
    "of a row": (
        "scored_attention", "depends on other scores of its query, through reduce_sum",
        lambda q, k, v: weighted(
            jax.nn.relu(scores(q, k) - scores(q, k).mean(-1, keepdims=True)), v
        ),
        Q, K, V,
    ),
    "over_heads": (
        "attention", "summed along another",
        lambda q, k, v: weighted(jax.nn.softmax(scores(q, k), 1), v), Q, K, V,
    ),
    "over_queries_too": (
        "attention", "over more axes than the keys", over_queries_too, Q, K, V
    ),
    "squared": (
        "attention", "raised to a power after the softmax",
        lambda q, k, v: weighted(jax.nn.softmax(scores(q, k)) ** 2, v), Q, K, V,
    ),
    "mixed_heads": (
        "attention", "weights of several heads are mixed", mixed_heads, Q, K, V
    ),
    "mixed_scores": (
        "attention", "scores of several heads are mixed",
        lambda q, k, v: weighted(
            jax.nn.softmax(jnp.einsum("bnts,nm->bmts", scores(q, k), WEIGH)), v
        ),
        Q, K, V,
    ),
    "divided_again": (
        "attention", "divided by more than one sum", divided_again, Q, K, V
    ),
    "undivided": (
        "attention", "not divided by a sum of weights",
        lambda q, k, v: weighted(jnp.exp(scores(q, k)), v), Q, K, V,
    ),
    "two_kinds_of_weights": (
        "attention", "a sum of a softmax and other weights",
        two_kinds_of_weights, Q, K, V,
    ),
    "root_of_the_mean": (
        "rms_norm", "not by its own deviation", root_of_the_mean, X
    ),
    "not_centred": (
        "layer_norm", "its mean is not subtracted",
        lambda x: x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6), X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_what_the_program_does(name):
    op, words, fn, *args = REASONS[name]
    report = rewriter.explain(fn)(*args)
    assert {m.op for m in report.misses} == {op}
    assert all(words in m.reasons[0].text for m in report.misses)
    assert not report.sites


EXPECTED = {
    "product_inside": (
        "gated_linear_unit", "the product of both branches",
        lambda x, w, u: jax.nn.silu((x @ w) * (x @ u)), X, W, U,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_words_for_what_gates_nothing(name):
    op, words, fn, *args = EXPECTED[name]
    report = rewriter.explain(fn)(*args)
    assert (report.misses, report.sites) == ((), ())
    assert words in report.why_not(op)


def highway(x, w):
    gate = jax.nn.sigmoid(x @ w @ w.T)
    return gate * jnp.tanh(x) + (1 - gate) * x


def hinge(x, w):
    z = x @ w
    own = jnp.take_along_axis(z, LABELS[:, None], -1)
    return jnp.maximum(z - own + 1, 0)


def merged_experts(x, w, up, down):
    """Matrices are averaged by a router's softmax."""
    g = jax.nn.softmax(x @ w)
    h = jax.nn.relu(jnp.einsum("td,te,edf->tf", x, g, up))
    return jnp.einsum("tf,te,efd->td", h, g, down)


def switched_experts(x, w, up, down):
    experts = zip(up, down, strict=True)
    layers = [lambda x, u=u, d=d: jax.nn.relu(x @ u) @ d for u, d in experts]
    of_token = jax.vmap(lambda x, i: jax.lax.switch(i, layers, x))
    return of_token(x, (x @ w).argmax(-1))


def graph_convolution(x, adjacent):
    root = jax.lax.rsqrt(adjacent.sum(-1) + 1e-6)
    return (adjacent * root[:, None] * root) @ x


def trust_ratio(x, w):
    """What LAMB multiplies an update by."""
    return w * jnp.linalg.norm(x) / jnp.maximum(jnp.linalg.norm(w), 1e-6)


def outer_product(x, w, u):
    return (jax.nn.silu(x @ w))[:, :, None] * (x @ u)[:, None]


def time_mix(x, w, u):
    """A layer of RWKV without its decay."""
    key = x @ w
    e = jnp.exp(key - key.max(0))
    return jnp.cumsum(e * (x @ u), 0) / jnp.cumsum(e, 0)


SILENT = {
    "graph_convolution": (graph_convolution, X, np.abs(X[:, :4])),
    "trust_ratio": (trust_ratio, X, W),
    "outer_product": (outer_product, X, W, U),
    "time_mix": (time_mix, X, W, U),
    "merged_experts": (merged_experts, X, W, UP, DOWN),
    "switched_experts": (switched_experts, X, W, UP, DOWN),
    "highway": (highway, X, W),
    "hinge": (hinge, X, W),
    "maxout": (lambda x, w, u: jnp.maximum(x @ w, x @ u), X, W, U),
    "summed": (lambda x, w, u: jax.nn.silu(x @ w) + x @ u, X, W, U),
    "softmax_gate": (lambda x, w, u: jax.nn.softmax(x @ w) * (x @ u), X, W, U),
    "self_gated": (lambda x, w: jax.nn.silu(x @ w) * (x @ w), X, W),
    "split_input": (lambda x: jax.nn.sigmoid(x[:, :4]) * x[:, 4:], X),
    "one_hot_of_largest": (
        lambda q, k, v: weighted(jax.nn.one_hot(scores(q, k).argmax(-1), 6), v),
        Q, K, V,
    ),
    "weights_alone": (lambda q, k: jax.nn.softmax(scores(q, k)), Q, K),
    "by_the_median": (
        lambda x: x / (jnp.median(jnp.abs(x), -1, keepdims=True) + 1e-6), X
    ),
    "by_the_largest": (lambda x: x / (jnp.abs(x).max(-1, keepdims=True) + 1e-6), X),
    "by_the_sum": (lambda x: x / (jnp.abs(x).sum(-1, keepdims=True) + 1e-6), X),
    "norm_of_another": (
        lambda x, y: x * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6),
        X, X[0],
    ),
    "dynamic_tanh": (lambda x: jnp.tanh(0.5 * x), X),
    "binary": (
        lambda x, w: jnp.log1p(jnp.exp(-jnp.abs(x @ w))) + jnp.maximum(x @ w, 0), X, W
    ),
    "batched": (jnp.matmul, UP, DOWN),
    "sigmoid_focal": (
        lambda x, w: optax.sigmoid_focal_loss(x @ w, jnp.ones((4, 6))).sum(-1), X, W
    ),
}  # fmt: skip


def test_nothing_is_said_of_what_is_no_op_to_a_reader():
    for name, (fn, *args) in SILENT.items():
        report = rewriter.explain(fn)(*args)
        found = *report.misses, *report.sites, *report.look_alikes()
        assert not found, name
        floats = tuple(range(len(args)))
        gradient = jax.grad(lambda *a, fn=fn: fn(*a).sum(), floats)
        assert not rewriter.explain(gradient)(*args).misses, name


def test_a_batch_norm_is_named_so_beside_a_skip_connection():
    def block(x, skip, scale, bias):
        y = x - x.mean((0, 1, 2), keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean((0, 1, 2), keepdims=True) + 1e-5)
        return jax.nn.relu(y * scale + bias + skip)

    image, one = np.ones((2, 3, 3, 8), "f4"), np.ones(8, "f4")
    (miss,) = rewriter.explain(block)(image, image, one, one).misses
    assert "a batch norm" in miss.reasons[0].text


def test_a_group_norm_of_interleaved_groups_is_named():
    def norm(x, scale):
        y = x.reshape(2, 3, 3, 4, 2)
        y = y - y.mean((1, 2, 3), keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean((1, 2, 3), keepdims=True) + 1e-6)
        return y.reshape(x.shape) * scale

    image = np.ones((2, 3, 3, 8), "f4")
    (miss,) = rewriter.explain(norm)(image, np.ones(8, "f4")).misses
    assert miss.op == "group_norm"
    assert "interleaved groups" in miss.reasons[0].text


def test_a_group_norm_of_joined_arrays_is_found():
    linen = pytest.importorskip("flax.linen")
    norm = linen.GroupNorm(2)
    scales = {"params": {"scale": np.ones(8, "f4"), "bias": np.ones(8, "f4")}}
    image = np.ones((2, 3, 3, 8), "f4")
    skip = lambda s, a, b: norm.apply(s, jnp.concatenate([a, b], -1))  # as in a U-Net
    report = rewriter.explain(skip)(scales, image[..., :6], image[..., 6:])
    assert [s.op for s in report.sites] == ["group_norm"]
    assert not report.misses
