"""Which kernel is chosen, by size and by platform."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.choose import choose
from rewriter.config import Config
from rewriter.device import Device
from rewriter.kernel import spec_of
from rewriter.registry import registry

T = 1024
QKV = jax.ShapeDtypeStruct((1, T, 4, 32), jnp.float32)
HUGE = jax.ShapeDtypeStruct((4, 1 << 16, 8, 64), jnp.float32)


def on(platform: str) -> Device:
    return Device(platform, platform)


def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 32**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("x", "platform", "kernel"),
    [(QKV, "cpu", "memory_bounded"), (QKV, "cuda", "xla"), (QKV, "tpu", "xla"),
     (HUGE, "cuda", "memory_bounded")],
)  # fmt: skip
def test_attention_by_platform(x, platform: str, kernel: str) -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": x, "k": x, "v": x}, {})
    choice = choose(spec, Config(), registry().kernels("attention"), on(platform))
    assert choice.kernel == kernel
    if kernel == "xla":
        assert platform in dict(choice.not_chosen)["memory_bounded"]


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "gated_linear_unit"])
def test_memory_bound_ops_stay_with_xla_on_a_gpu(op: str) -> None:
    (kernel,) = registry().kernels(op)
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    operands = {"x": x} if "norm" in op else dict.fromkeys(("x", "w_gate", "w_up"), x)
    spec = spec_of(registry().op(op), operands, {})
    assert kernel.profitable(spec, "cpu").ok
    assert not kernel.profitable(spec, "cuda").ok


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chooses for a CPU")
def test_one_program_holds_a_kernel_per_platform() -> None:
    """Traced on a CPU: a loop over blocks there, dense attention on a GPU."""
    fast = jax.jit(rewriter.optimize(attention))
    dense = f"{T}x{T}xf32"
    for platform, is_dense in (("cpu", False), ("cuda", True)):
        lowered = fast.trace(QKV, QKV, QKV).lower(lowering_platforms=(platform,))
        assert (dense in lowered.as_text()) == is_dense


def test_a_failure_at_one_anchor_leaves_the_others(monkeypatch) -> None:
    """Neither comparing with a proved region nor reading a new one stops the rest."""
    from rewriter import match

    def broken(*args):
        raise ValueError("a bug")

    def norms(x, scale):
        for _ in range(2):
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        return x

    monkeypatch.setattr(match, "apply", broken)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.warns(rewriter.RewriterWarning, match="a bug"):
        report = rewriter.explain(norms)(x, jax.ShapeDtypeStruct((16,), jnp.float32))
    assert report.counts()["rms_norm"] == 2
    assert any("a bug" in str(f) for f in report.failures)


def test_nothing_is_said_of_kernels_for_other_platforms() -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": QKV, "k": QKV, "v": QKV}, {})
    kernels = registry().kernels("attention")
    assert "cudnn" not in dict(choose(spec, Config(), kernels, on("cpu")).not_chosen)
    assert "cudnn" in dict(choose(spec, Config(), kernels, on("cuda")).not_chosen)
    alone = [k for k in kernels if k.name == "cudnn"]
    why = dict(choose(spec, Config(), alone, on("cpu")).not_chosen)
    assert why["cudnn"] == "runs on cuda, not cpu"


def test_what_is_exported_has_only_kernels_that_may_be() -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": QKV, "k": QKV, "v": QKV}, {})
    bounded = next(k for k in registry().kernels("attention") if k.name != "cudnn")
    kernels = [dataclasses.replace(bounded, exportable=False)]
    assert choose(spec, Config(), kernels, on("cpu")).kernel == bounded.name
    choice = choose(spec, Config(exporting=True), kernels, on("cpu"))
    assert choice.kernel == "xla"
    assert "exported" in dict(choice.not_chosen)[bounded.name]
    forced = (("attention", (bounded.name,), ()),)
    config = Config(implementation=forced)
    assert choose(spec, config, kernels, on("cpu")).kernel == bounded.name
    with pytest.raises(rewriter.KernelError, match="exported"):
        choose(spec, dataclasses.replace(config, exporting=True), kernels, on("cpu"))
