"""Programs of many layers, rewritten by way of a few: the same program comes out."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.config import resolve
from rewriter.program import fold
from rewriter.program.repeats import Numbered, runs
from rewriter.run import pipeline, rewriting, steps

pytestmark = pytest.mark.once

LAYERS = 14
B, T, D, HEADS = 2, 8, 16, 2
CONFIG = resolve({"implementation": {
    "attention": "reference", "gated_linear_unit": "reference",
    "rms_norm": "reference", "layer_norm": "reference",
}})  # fmt: skip


@pytest.fixture(autouse=True)
def _small_programs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "WORTH", 100)


def weights(layers: int = LAYERS) -> list[dict[str, jax.Array]]:
    shape = {
        "q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "gate": (D, 2 * D),
        "up": (D, 2 * D), "down": (2 * D, D), "n1": (D,), "n2": (D,),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return [
        {k: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for k, s in shape.items()}
        for _ in range(layers)
    ]


X = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)


def norm(x, scale, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def attention(p, x):
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).reshape(b, t, HEADS, d // HEADS) for w in "qkv")
    s = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(d // HEADS)
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v).reshape(b, t, d) @ p["o"]


def unit(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def layer(p, x, eps=1e-6):
    x = x + attention(p, norm(x, p["n1"], eps))
    return x + unit(p, norm(x, p["n2"]))


def decoder(ps, x):
    for p in ps:
        x = layer(p, x)
    return x


def loss(ps, x):
    return jnp.mean(decoder(ps, x) ** 2)


def written_out_twice(fn, *args):
    """A function's program, rewritten by way of fewer layers, and as it is."""
    closed = jax.make_jaxpr(fn)(*args)
    return closed, *twice(closed, CONFIG)


def twice(closed, config):
    """A program rewritten by way of fewer layers, and rewritten as it is."""
    short = rewriting.rewrite(closed, config)
    patch = pytest.MonkeyPatch()
    patch.setattr(steps, "fold", lambda closed, behind: None)
    whole = rewriting.rewrite(closed, config)
    patch.undo()
    return short, whole


def check(fn, *args, folds: bool = True):
    closed, short, whole = written_out_twice(fn, *args)
    assert ("unfold" in short.seconds) == folds
    assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
    assert short.sites == whole.sites
    assert short.key == whole.key
    stacks = [
        [str(e.source_info.name_stack) for e in r.closed_jaxpr.eqns]
        for r in (short, whole)
    ]
    assert stacks[0] == stacks[1]
    leaves = jax.tree.leaves(args)
    want = jaxpr_as_fun(closed)(*leaves)
    got = jaxpr_as_fun(short.closed_jaxpr)(*leaves)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    return short


def test_a_decoder() -> None:
    short = check(decoder, weights(), X)
    assert len(short.sites) == 4 * LAYERS
    assert all(s.replaced for s in short.sites)
    assert [s.index for s in short.sites] == list(range(1, 4 * LAYERS + 1))


def test_a_gradient() -> None:
    short = check(jax.value_and_grad(loss), weights(20), X)
    assert sum(s.backward for s in short.sites) >= 4 * 20 - 1


def test_a_training_step() -> None:
    def step(ps, mu, x):
        value, grads = jax.value_and_grad(loss)(ps, x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        ps = jax.tree.map(lambda p, m: p - 0.01 * m / (1 + jnp.abs(m)), ps, mu)
        norms = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return value, norms, ps, mu

    ps = weights(20)
    check(step, ps, jax.tree.map(jnp.zeros_like, ps), X)


def test_half_precision() -> None:
    def step(ps, x):
        def half(ps):
            ps = jax.tree.map(lambda p: p.astype(jnp.bfloat16), ps)
            return loss(ps, x.astype(jnp.bfloat16)).astype(jnp.float32)

        return jax.value_and_grad(half)(ps)

    _, short, whole = written_out_twice(step, weights(20), X)
    assert "unfold" in short.seconds
    assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
    assert short.sites == whole.sites


def rectified(p, x):
    return jax.nn.relu(x @ p["up"]) @ p["down"]


@pytest.mark.parametrize("differentiated", [False, True])
def test_functions_of_jax_with_a_rule_are_alike(differentiated: bool) -> None:
    def program(ps, x):
        for p in ps:
            x = x + attention(p, norm(x, p["n1"]))
            x = x + rectified(p, norm(x, p["n2"]))
        return jnp.sum(x * x)

    fn = jax.value_and_grad(program) if differentiated else program
    closed, short, whole = written_out_twice(fn, weights(), X)
    assert "unfold" in short.seconds
    assert short.sites == whole.sites
    leaves = jax.tree.leaves((weights(), X))
    places = 0, len(leaves) - 1
    want, got = (
        jax.value_and_grad(lambda *xs, p=p: jaxpr_as_fun(p)(*xs)[0], places)(*leaves)
        for p in (closed, short.closed_jaxpr)
    )
    for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_another_rule_in_one_layer_stays_its_own() -> None:
    other = jax.custom_jvp(lambda x: jnp.maximum(x, 0))
    other.defjvp(lambda x, dx: (other(*x), 3 * dx[0]))

    def program(ps, x):
        for k, p in enumerate(ps):
            act = other if k == 5 else jax.nn.relu
            x = norm(x + act(x @ p["up"]) @ p["down"], p["n1"])
        return jnp.sum(x * x)

    closed = jax.make_jaxpr(program)(weights(), X)
    rewritten = jaxpr_as_fun(rewriting.rewrite(closed, CONFIG).closed_jaxpr)
    leaves = jax.tree.leaves((weights(), X))
    want = jax.grad(lambda x: program(weights(), x))(X)
    got = jax.grad(lambda x: rewritten(*leaves[:-1], x)[0])(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_rows_of_an_array_that_holds_one_number_are_alike() -> None:
    def program(ps, x, number):
        rows = jnp.full((len(ps), D), 0.5).astype(jnp.int32).astype(jnp.float32)
        own = jnp.full((len(ps), D), 2.0).at[3].set(number)
        for k, p in enumerate(ps):
            x = layer(p, x) * (1 - rows[k])
        return x * own[3]

    closed, short, _ = written_out_twice(program, weights(), X, 3.0)
    assert "unfold" in short.seconds
    leaves = jax.tree.leaves((weights(), X, 3.0))
    want = jaxpr_as_fun(closed)(*leaves)
    got = jaxpr_as_fun(short.closed_jaxpr)(*leaves)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_rows_of_an_array_of_several_numbers_stay_their_own() -> None:
    def program(ps, x):
        rows = jnp.full((len(ps), D), 0.5).at[4].set(2.0)
        for k, p in enumerate(ps):
            x = layer(p, x) * rows[k]
        return x

    closed, short, _ = written_out_twice(program, weights(), X)
    leaves = jax.tree.leaves((weights(), X))
    want = jaxpr_as_fun(closed)(*leaves)
    got = jaxpr_as_fun(short.closed_jaxpr)(*leaves)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def centred(x, scale, bias):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    return ((x - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + bias).astype(x.dtype)


def test_turns_begin_between_layers_and_not_in_a_norms_gradient() -> None:
    def layers(ps, x):
        *ps, last = ps
        for p in ps:
            x = x + attention(p, centred(x, p["n1"], p["b1"]))
            x = x + jax.nn.gelu(centred(x, p["n2"], p["b2"]) @ p["up"]) @ p["down"]
        x = centred(x, last["n1"], last["b1"]) @ last["up"]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    wide = lambda a: jax.ShapeDtypeStruct([n * 48 for n in a.shape], jnp.bfloat16)
    ps = jax.tree.map(wide, [p | {"b1": p["n1"], "b2": p["n2"]} for p in weights()])
    x = jax.ShapeDtypeStruct((8, 1024, 48 * D), jnp.bfloat16)
    closed = jax.make_jaxpr(jax.value_and_grad(layers))(ps, x)
    for device in ("NVIDIA H200", "cpu"):
        short, whole = twice(closed, resolve({"target": device}))
        assert "unfold" in short.seconds
        assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
        assert short.sites == whole.sites


def test_every_layer_returned() -> None:
    def program(ps, x):
        found = []
        for p in ps:
            x = layer(p, x)
            found.append(x)
        return found

    check(program, weights(), X)


def test_weights_of_two_layers_in_turn() -> None:
    check(lambda ps, x: decoder([ps[i % 2] for i in range(24)], x), weights(2), X)


def test_weights_that_all_layers_share() -> None:
    check(lambda ps, x: decoder(ps * LAYERS, x), weights(1), X)


def test_a_model_with_bridges() -> None:
    def program(ps, x):
        kept = []
        for p in ps:
            x = layer(p, x)
            kept.append(x)
        for p, y in zip(ps[::-1], kept[::-1], strict=True):
            x = layer(p, x + y * 0.5)
        return x

    check(program, weights(), X)


def test_weights_made_for_each_layer() -> None:
    def program(ps, x):
        ps = [{k: jnp.tanh(v) * 2 for k, v in p.items()} for p in ps]
        return decoder(ps, x)

    check(program, weights(), X)


def odd_epsilon(ps, x):
    for i, p in enumerate(ps):
        x = layer(p, x, eps=1e-3 if i == LAYERS // 2 else 1e-6)
    return x


def other_epsilons(ps, x):
    for i, p in enumerate(ps):
        x = layer(p, x, eps=1e-6 * (i + 1))
    return x


def one_gate_from_another(ps, x):
    ps = [dict(p, gate=jnp.tanh(p["gate"])) for p in ps]
    ps[6]["gate"] = jnp.sin(ps[6]["up"])
    return decoder(ps, x)


def constant_masks(ps, x):
    for i, p in enumerate(ps):
        keep = np.tril(np.ones((T, T), bool))
        if i == 5:
            keep[3, 1] = False
        q, k, v = ((x @ p[w]).reshape(B, T, HEADS, D // HEADS) for w in "qkv")
        s = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(D // HEADS)
        s = jnp.where(keep, s, -1e30)
        x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v).reshape(B, T, D)
    return x


def two_layers_back(ps, x):
    before = x
    for p in ps:
        before, x = x, layer(p, x) + before
    return x


def one_value_read_twice(ps, x):
    for i, p in enumerate(ps):
        x = layer(dict(p, up=p["gate"]) if i == 5 else p, x)
    return x


def in_random_order(ps, x):
    order = random.Random(0).sample(range(len(ps)), len(ps))
    return decoder([ps[i] for i in order], x)


@pytest.mark.parametrize(
    "program",
    [odd_epsilon, other_epsilons, one_gate_from_another, constant_masks,
     two_layers_back, one_value_read_twice, in_random_order],
)  # fmt: skip
@pytest.mark.parametrize("differentiated", [False, True])
def test_layers_that_are_not_quite_equal(program, differentiated: bool) -> None:
    def gradient(ps, x):
        return jax.value_and_grad(lambda p: jnp.mean(program(p, x) ** 2))(ps)

    fn = gradient if differentiated else program
    _, short, whole = written_out_twice(fn, weights(), X)
    assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
    assert short.sites == whole.sites


def test_constants_of_layers_are_not_taken_for_each_other() -> None:
    closed = jax.make_jaxpr(constant_masks)(weights(), X)
    found = runs(Numbered(closed))
    assert all(r.count < LAYERS // 2 for r in found)


def beside(p, x):
    """A unit without a norm: its input's gradient is only terms of a sum."""
    return x + unit(p, x + attention(p, norm(x, 1.0)))


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_gradients_that_are_terms_of_a_sum(around) -> None:
    def loss(ps, x):
        for p in ps:
            x = around(beside)(p, x)
        return jnp.mean(x**2)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    _, short, whole = written_out_twice(step, weights(), X)
    assert "unfold" in short.seconds
    assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
    assert short.sites == whole.sites
    assert sum(s.backward for s in short.sites) == len(short.sites) == 3 * LAYERS
    assert all(bool(s.again) == (around is jax.checkpoint) for s in short.sites)


def sizes_of_passes(fn, *args) -> dict[str, int]:
    """The equations that the sieve and the search for sums of softmaxes were given."""
    sizes = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("keep_possible_patterns", "multiply_softmaxes"):
            (step,) = (s for s in pipeline.PREPARE if s.run is getattr(steps, name))

            def run(program, name=name, real=step.run):
                sizes[name] = len(program.closed_jaxpr.eqns)
                return real(program)

            noted = dataclasses.replace(step, run=run)
            passes = [noted if s is step else s for s in rewriting.PREPARE]
            patch.setattr(rewriting, "PREPARE", tuple(passes))
        rewriting.rewrite(jax.make_jaxpr(fn)(*args), CONFIG)
    return sizes


def test_layers_are_left_out_before_a_program_is_prepared() -> None:
    whole = len(jax.make_jaxpr(decoder)(weights(20), X).eqns)
    sizes = sizes_of_passes(decoder, weights(20), X)
    assert max(sizes.values()) < whole / 2


def differential(ps, x):
    """Layers whose sums of softmaxes are multiplied one by one first."""
    for p in ps:
        h = norm(x, p["n1"])
        q, k, v = ((h @ p[w]).reshape(B, T, HEADS, D // HEADS) for w in "qkv")
        one = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        other = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", k, q))
        y = jnp.einsum("bhts,bshd->bthd", one - 0.3 * other, v)
        x = x + y.reshape(B, T, D) @ p["o"]
    return x


def test_layers_that_a_pass_changes_are_all_prepared() -> None:
    """The pass that multiplies softmaxes one by one changes what is left of them."""
    whole = len(jax.make_jaxpr(differential)(weights(), X).eqns)
    sizes = sizes_of_passes(differential, weights(), X)
    assert sizes["multiply_softmaxes"] == whole
    short = check(differential, weights(), X)
    assert sum(s.op == "attention" for s in short.sites) == 2 * LAYERS
    assert all(s.replaced for s in short.sites)


def test_gradients_of_equal_sites_are_traced_once(monkeypatch) -> None:
    traced: list[str] = []

    def count(name: str) -> None:
        real = getattr(_jax, name)
        counted = lambda *args: (traced.append(name), real(*args))[1]
        monkeypatch.setattr(_jax, name, counted)

    count("linearized")
    count("trace_placed")
    program = jax.make_jaxpr(jax.value_and_grad(loss))(weights(), X)
    rewritten = rewriting.rewrite(program, CONFIG)
    assert {s.op for s in rewritten.sites if s.backward} == {
        "attention", "gated_linear_unit", "rms_norm",
    }  # fmt: skip
    # Both passes of each op, and of the first norm, of which the input has no gradient.
    assert sorted(traced) == ["linearized"] * 4 + ["trace_placed"] * 4
