"""What layers keep for their gradients, compiled: no more than as written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import rewriter
from tests import slow

pytestmark = pytest.mark.once

ROWS, HEADS, WIDTH, HIDDEN, EXPERTS = 128, 4, 64, 128, 4
INPUT = 4 * ROWS * WIDTH
"""Bytes of what goes from layer to layer."""

FORCED = {
    "attention": "memory_bounded", "rms_norm": "memory_bounded",
    "layer_norm": "memory_bounded", "gated_linear_unit": "memory_bounded",
    "ragged_dot": "memory_bounded",
}  # fmt: skip
POLICIES = jax.checkpoint_policies


# --------------------------------------------------------------------- layers
def attention(x: Any, w: Any) -> Any:
    """Whose result nothing but the sum reads, so that no gradient needs it."""
    t = x.shape[0]
    parts = jnp.split(x @ w["qkv"], 3, -1)
    heads = (t, HEADS, WIDTH // HEADS)
    q, k, v = (
        checkpoint_name(z.reshape(heads), n) for n, z in zip("qkv", parts, strict=True)
    )
    scores = jnp.einsum("tnh,snh->nts", q, k) / heads[-1] ** 0.5
    scores = jnp.where(jnp.tri(t, dtype=bool), scores, -1e30)
    out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v)
    return x + checkpoint_name(out, "out").reshape(t, WIDTH)


def apart(x: Any, w: Any) -> Any:
    """Attention with three products and one behind it, none of them causal."""
    heads = (x.shape[0], HEADS, WIDTH // HEADS)
    q, k, v = (checkpoint_name((x @ w[n]).reshape(heads), n) for n in "qkv")
    scores = jnp.einsum("tnh,snh->nts", q, k) / heads[-1] ** 0.5
    out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v)
    return x + checkpoint_name(out.reshape(x.shape), "out") @ w["o"]


def rms(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def norm_in_front(x: Any, w: Any) -> Any:
    return x + checkpoint_name(rms(x, w["scale"]), "normed") @ w["w"]


def norm_behind(x: Any, w: Any) -> Any:
    return x + rms(checkpoint_name(x @ w["w"], "product"), w["scale"])


def layer_norm_behind(x: Any, w: Any) -> Any:
    h = x @ w["w"]
    centred = h - h.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return x + centred * jax.lax.rsqrt(variance + 1e-6) * w["scale"]


def unit_behind(x: Any, w: Any) -> Any:
    return x + jax.nn.silu(checkpoint_name(x @ w["gate"], "gate")) * (x @ w["up"])


def unit(x: Any, w: Any) -> Any:
    return x + (jax.nn.silu(x @ w["wide"]) * (x @ w["wide2"])) @ w["down"]


def experts_behind(x: Any, w: Any) -> Any:
    return x + checkpoint_name(jax.lax.ragged_dot(x, w["experts"], sizes(x)), "rows")


def experts(x: Any, w: Any) -> Any:
    by = functools.partial(jax.lax.ragged_dot, group_sizes=sizes(x))
    hidden = jax.nn.silu(by(x, w["gates"])) * by(x, w["ups"])
    return x + by(hidden, w["downs"])


def sizes(x: Any) -> Any:
    t = x.shape[0]
    return jnp.array([t // 2, 0, t // 8, t // 4], jnp.int32)


SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH), "scale": (WIDTH,), "wide": (WIDTH, HIDDEN),
    "wide2": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    "experts": (EXPERTS, WIDTH, WIDTH), "gates": (EXPERTS, WIDTH, HIDDEN),
    "ups": (EXPERTS, WIDTH, HIDDEN), "downs": (EXPERTS, HIDDEN, WIDTH),
    **dict.fromkeys(("q", "k", "v", "o", "w", "gate", "up"), (WIDTH, WIDTH)),
}  # fmt: skip
READ = {
    attention: ("qkv",), apart: ("q", "k", "v", "o"), norm_in_front: ("w", "scale"),
    norm_behind: ("w", "scale"), layer_norm_behind: ("w", "scale"),
    unit_behind: ("gate", "up"), unit: ("wide", "wide2", "down"),
    experts_behind: ("experts",), experts: ("gates", "ups", "downs"),
}  # fmt: skip


# --------------------------------------------------------------------- programs
def in_a_loop(layer: Any, x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, p: (layer(x, p), None), x, w)[0]


def one_by_one(layer: Any, x: Any, w: Any) -> Any:
    for k in range(jax.tree.leaves(w)[0].shape[0]):
        x = layer(x, jax.tree.map(lambda a, k=k: a[k], w))
    return x


def scanned(layer: Any, kept: Any) -> Any:
    return functools.partial(in_a_loop, kept(layer))


def unrolled(layer: Any, kept: Any) -> Any:
    return functools.partial(one_by_one, kept(layer))


def around_the_loop(layer: Any, kept: Any) -> Any:
    return kept(functools.partial(in_a_loop, layer))


def nested(layer: Any, kept: Any) -> Any:
    """Layers two by two: a checkpoint around both, and one around each."""
    both = kept(functools.partial(in_a_loop, kept(layer)))

    def run(x: Any, w: Any) -> Any:
        pairs = jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), w)
        return in_a_loop(both, x, pairs)

    return run


def loss_of(program: Any, layer: Any, policy: Any) -> Callable[..., Any]:
    kept = functools.partial(jax.checkpoint, policy=policy)
    run = program(layer, kept)
    return lambda x, w: (run(x, w) ** 2).sum()


def of_shapes(layer: Any, layers: int, rows: int) -> tuple[Any, Any]:
    weights = {n: jax.ShapeDtypeStruct((layers, *SHAPES[n]), "f4") for n in READ[layer]}
    return jax.ShapeDtypeStruct((rows, WIDTH), "f4"), weights


def compiled(step: Any, args: Any) -> Any:
    return step.lower(*args).compile()


WAYS: dict[str, Callable[[Any], Any]] = {
    "as written": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "optimize(grad)": lambda f: rewriter.optimize(
        jax.grad(f, (0, 1)), implementation=FORCED
    ),
    "grad(optimize)": lambda f: jax.jit(
        jax.grad(rewriter.optimize(f, implementation=FORCED), (0, 1))
    ),
}


def a_layer_more(way: str, program: Any, layer: Any, policy: Any, rows: int) -> float:
    """Bytes that a step needs for each layer more."""
    loss, few, many = loss_of(program, layer, policy), 4, 12
    step = WAYS[way](loss)
    temporary = [
        compiled(step, of_shapes(layer, n, rows)).memory_analysis().temp_size_in_bytes
        for n in (few, many)
    ]
    return (temporary[1] - temporary[0]) / (many - few)


NAMES = POLICIES.save_only_these_names("q", "k", "v")
BUT = POLICIES.save_any_names_but_these("out", "normed")
OFFLOADED = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["q"], names_which_can_be_offloaded=["out"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip

CASES = [
    (scanned, attention, None, ROWS),
    (scanned, attention, None, 512),
    (unrolled, attention, None, ROWS),
    (nested, attention, None, ROWS),
    (scanned, attention, NAMES, ROWS),
    (scanned, apart, POLICIES.dots_with_no_batch_dims_saveable, ROWS),
    (scanned, norm_behind, None, ROWS),
    (scanned, norm_in_front, BUT, ROWS),
    (nested, layer_norm_behind, None, ROWS),
    (scanned, unit_behind, None, ROWS),
    (scanned, experts_behind, None, ROWS),
    (nested, experts, None, ROWS),
    (around_the_loop, attention, None, ROWS),
    (around_the_loop, experts, None, ROWS),
    (scanned, attention, BUT, ROWS),
    (scanned, attention, POLICIES.everything_saveable, ROWS),
    (scanned, attention, POLICIES.dots_saveable, ROWS),
    (scanned, apart, OFFLOADED, ROWS),
    (scanned, apart, NAMES, ROWS),
    (nested, unit, None, ROWS),
    (scanned, unit, POLICIES.dots_saveable, ROWS),
    (unrolled, norm_behind, None, ROWS),
    (scanned, experts, POLICIES.dots_saveable, ROWS),
    (nested, norm_behind, BUT, ROWS),
]


@pytest.mark.parametrize("case", slow.first(5, CASES))
def test_a_layer_keeps_no_more_than_as_written(case):
    written = a_layer_more("as written", *case)
    for way in ("optimize(grad)", "grad(optimize)"):
        assert a_layer_more(way, *case) <= 1.01 * written + 512, way


KEPT = {
    "nothing": (None, 1),
    "names": (NAMES, 4),
    "no such name": (POLICIES.save_only_these_names("other"), 1),
    "all but": (BUT, 4),
    "products": (POLICIES.dots_with_no_batch_dims_saveable, 4),
}
"""By policy, how many arrays like its input a layer of attention keeps."""


@pytest.mark.parametrize("way", ["optimize(grad)", "grad(optimize)"])
@pytest.mark.parametrize("name", KEPT)
def test_policies_decide_what_is_kept(name, way):
    policy, arrays = KEPT[name]
    bytes_more = a_layer_more(way, scanned, attention, policy, ROWS)
    assert bytes_more == pytest.approx(arrays * INPUT, rel=0.02)


@pytest.mark.parametrize("way", ["optimize(grad)", "grad(optimize)"])
def test_what_a_policy_keeps_is_not_computed_again(way):
    product, args = 2 * ROWS * WIDTH * 3 * WIDTH, of_shapes(attention, 2, ROWS)
    steps = [WAYS[way](loss_of(scanned, attention, p)) for p in (None, NAMES)]
    flops = [compiled(step, args).cost_analysis()["flops"] for step in steps]
    assert flops[0] - flops[1] > 0.9 * product


def test_saved_residuals_have_the_names_that_are_asked_for(capsys):
    shown = {}
    for name, policy in {"names": NAMES, "all but": BUT, "nothing": None}.items():
        layer = jax.checkpoint(attention, policy=policy)
        fast = rewriter.optimize(layer, implementation=FORCED)
        x, w = of_shapes(attention, 1, ROWS)
        w = {n: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for n, a in w.items()}
        print_saved_residuals(fast, x, w)
        shown[name] = capsys.readouterr().out
    inner = f"f32[{ROWS},{HEADS},{WIDTH // HEADS}]"
    counts = {name: text.count(inner) for name, text in shown.items()}
    assert counts == {"names": 3, "all but": 3, "nothing": 0}
    assert "rewriter.attention" not in "".join(shown.values())


def test_gradients_are_the_same():
    for layer, policy in ((attention, NAMES), (apart, NAMES), (apart, None)):
        loss = loss_of(scanned, layer, policy)
        keys = iter(jax.random.split(jax.random.key(0), 9))
        args = jax.tree.map(
            lambda s: jax.random.normal(next(keys), s.shape) / s.shape[-2] ** 0.5,  # noqa: B023
            of_shapes(layer, 2, ROWS),
        )
        wanted, *found = (WAYS[way](loss)(*args) for way in WAYS)
        for grads in found:
            for got, want in zip(*map(jax.tree.leaves, (grads, wanted)), strict=True):
                assert jnp.linalg.norm(got - want) <= 1e-5 * jnp.linalg.norm(want)


def square_heads(x: Any, w: Any) -> Any:
    """Attention whose parts have their names with heads in front, as many as rows."""
    heads = (ROWS, ROWS, WIDTH // HEADS)
    q, k, v = (
        checkpoint_name((x @ w[n]).reshape(heads).swapaxes(0, 1), n) for n in "qkv"
    )
    out = jax.nn.softmax(q @ k.mT) @ v
    return x + out.swapaxes(0, 1).reshape(ROWS, -1) @ w["o"]


@pytest.mark.parametrize("way", ["optimize(grad)", "grad(optimize)"])
def test_gradients_of_names_in_another_layout_of_the_same_shape(way):
    width, inner = WIDTH, ROWS * (WIDTH // HEADS)
    rng = np.random.default_rng(0)
    w = {n: rng.normal(size=(2, width, inner)).astype("f4") * 0.05 for n in "qkv"}
    w["o"] = rng.normal(size=(2, inner, width)).astype("f4") * 0.05
    x = rng.normal(size=(ROWS, width)).astype("f4")
    loss = loss_of(scanned, square_heads, NAMES)
    wanted, found = (WAYS[name](loss)(x, w) for name in ("as written", way))
    for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert jnp.linalg.norm(got - want) <= 1e-5 * jnp.linalg.norm(want)
