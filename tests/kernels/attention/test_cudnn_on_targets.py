"""cuDNN on GPUs that are not here: what JAX would take there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter import _jax
from rewriter.kernels.attention import cudnn
from rewriter.kernels.attention.cudnn_limits import traced_on
from rewriter.kernels.attention.overflow import PARAM
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry

pytestmark = pytest.mark.once

OP = registry().op("attention")
A100, H100, L40S, B200 = map(device.named, ("a100", "h100", "l40s", "b200"))
BEFORE_HOPPER, SINCE = (A100, L40S), (H100, B200)
WIDTHS = (4, 8, 20, 64, 72, 80, 96, 100, 120, 128, 129, 136, 192, 250, 256, 264, 512)


def spec(h: int = 64, t: int = 256, s: int = 256, dtype: Any = jnp.bfloat16) -> Spec:
    return spec_of(OP, operands(h, t, s, dtype), {"scale": 0.1})


def operands(h: int, t: int = 256, s: int = 256, dtype: Any = jnp.bfloat16) -> dict:
    sizes = {"q": (2, t, 4, h), "k": (2, s, 2, h), "v": (2, s, 2, h)}
    return {n: jax.ShapeDtypeStruct(size, dtype) for n, size in sizes.items()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_are_those_that_jax_takes(width: int, training: bool) -> None:
    """JAX's own checks see no GPU here, as if it were one before Hopper."""
    if jax.default_backend() == "gpu":
        pytest.skip("JAX's checks ask the GPU that is here")
    given = operands(width).values()
    theirs = _jax.refusal_of_cudnn(*given, device.CUDNN, training=training)
    for before in BEFORE_HOPPER:
        assert traced_on(spec(width), before).ok == (not theirs), theirs
    for since in SINCE:  # which JAX compares on such a GPU alone, as does the next test
        wide = 128 < width <= 256 and width % 8 == 0
        assert traced_on(spec(width), since).ok == (not theirs or wide)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs cuDNN")
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_stated_is_what_jax_says_on_the_device(width: int) -> None:
    here = device.attached()
    if not here.cudnn:
        pytest.skip(f"nothing is stated of {here.kind}")
    assert cudnn.supports(spec(width)).ok == cudnn.supports_on(spec(width), here).ok


@pytest.mark.parametrize("sizes", [(729, 729), (729, 512), (512, 77), (1, 512), (8, 3)])
def test_odd_lengths_are_no_limit(sizes: tuple[int, int]) -> None:
    """They are made even, in which JAX sees no limit, with gradients and a bias too."""
    t, s = sizes
    assert cudnn.supports_on(spec(64, t, s), H100).ok
    even = operands(64, t + t % 2, s + s % 2).values()
    given = {"has_bias": True, "training": True}
    assert not _jax.refusal_of_cudnn(*even, device.CUDNN, **given)


def test_refusals_name_the_limit() -> None:
    text = lambda *args: cudnn.supports_on(*args).reasons[0].text
    assert "heads are 512 wide: on NVIDIA H100" in text(spec(512), H100)
    assert "a multiple of 8 up to 256" in text(spec(512), H100)
    assert "a multiple of 8 up to 128" in text(spec(192), A100)
    assert "16-bit float, not float32" in text(spec(64, dtype=jnp.float32), H100)
    latent = {
        **operands(192),
        "v": jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.bfloat16),
    }
    told = text(spec_of(OP, latent, {}), H100)
    assert "heads of v are 128 wide, and those of q 192" in told
    with pytest.raises(ValueError, match="value shape should be"):  # JAX says so too
        jax.eval_shape(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v), *latent.values()
        )


def test_an_old_cudnn_is_refused() -> None:
    new = Device("NVIDIA B300", "cuda", capability=(10, 3), cudnn=91002)
    told = cudnn.supports_on(spec(), new).reasons[0].text
    assert told == "NVIDIA B300 needs cuDNN 9.11.0, and 9.10.2 is assumed"
    assert cudnn.supports_on(spec(), replace(new, cudnn=91100)).ok


def test_every_known_gpu_states_its_cudnn() -> None:
    for known in device.KNOWN.values():
        stated = bool(known.cudnn), bool(known.capability)
        assert stated == (known.platform == "cuda",) * 2


def full(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


X = jax.ShapeDtypeStruct((4, 2048, 16, 64), jnp.bfloat16)
ASKED = {"attention": ["cudnn", "xla"]}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_a_target_is_described_and_not_run() -> None:
    """What is traced here has no cuDNN; what is only described has the target's."""
    fast = rewriter.optimize(full, target="h100", implementation=ASKED)
    (site,) = rewriter.explain(full, target="h100")(X, X, X).sites
    assert site.kernel == "cudnn" or "times as long" in dict(site.not_chosen)["cudnn"]
    (site,) = rewriter.explain(fast)(X, X, X).sites
    assert (site.kernel, site.replaced) == ("cudnn", True)
    (site,) = fast.report(X, X, X).sites
    assert not site.replaced
    assert "this machine, which has no cuDNN" in dict(site.not_chosen)["cudnn"]
    lowered = fast.trace(X, X, X).lower(lowering_platforms=("cuda",))
    assert "cudnn" not in lowered.as_text()
    (site,) = rewriter.explain(fast)(X, X, X).sites
    assert site.kernel == "cudnn"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
@pytest.mark.parametrize("target", ["a100", "b200"])
def test_gradients_on_a_target(target: str) -> None:
    grad = jax.grad(lambda *x: full(*x).astype(jnp.float32).sum(), (0, 1, 2))
    (site,) = rewriter.explain(grad, target=target, implementation=ASKED)(X, X, X).sites
    assert (site.kernel, site.backward) == ("cudnn", True)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_a_device_of_which_nothing_is_stated_asks_jax() -> None:
    unknown = Device("NVIDIA of next year", "cuda")
    assert cudnn.supports_on(spec(), unknown) == cudnn.supports(spec())


@pytest.mark.parametrize("name", ["cudnn", "hopper_decode"])
def test_a_step_of_decoding_is_described(name: str) -> None:
    q = jax.ShapeDtypeStruct((2, 1, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8192, 32, 128), jnp.bfloat16)
    wanted = {"attention": name}
    found = rewriter.explain(full, target="h100", implementation=wanted)(q, k, k)
    assert [s.kernel for s in found.sites] == [name]
    assert not found.failures


def test_what_overflows_is_refused_on_targets_too() -> None:
    kernel = next(k for k in registry().kernels("attention") if k.name == "cudnn")
    given = spec_of(OP, operands(64), {PARAM: "float32"})
    told = kernel.limits.supports_on(given, H100).reasons[0].text
    assert "which rows overflow" in told
