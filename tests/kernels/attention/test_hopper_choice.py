"""Attention on Hopper: in which programs it is chosen, by its estimate."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.kernels.attention import cudnn
from rewriter.kernels.attention.hopper import (
    time_model,
)
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from rewriter.support.verdict import YES, no
from tests.bench import record
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    FORCED,
    H200,
    PROGRAMS,
    X,
    attention,
    spec,
)


@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_exported_without_a_gpu(name: str) -> None:
    """JAX keeps the call of such kernels stable in exported programs."""
    fast = rewriter.optimize(PROGRAMS[name], implementation=FORCED)
    (site,) = fast.report(X, X, X).sites
    assert site.kernel == "hopper"
    artifact = rewriter.export(fast, platforms=("cpu", "cuda"))(X, X, X)
    assert artifact.manifest["custom_calls"] == ["mosaic_gpu_v2"]


def test_it_is_chosen_for_hopper_gpus() -> None:
    x = jax.ShapeDtypeStruct((8, 2048, 8, 64), jnp.bfloat16)
    for target in ("h200", "h100"):
        fast = rewriter.optimize(attention, target=target, tune="off")
        for report in (rewriter.explain(fast)(x, x, x), fast.report(x, x, x)):
            (site,) = report.sites
            assert (site.kernel, site.origin) == ("hopper", "estimated")
        (site,) = rewriter.explain(fast)(X, X, X).sites
        assert site.kernel == "cudnn"  # of 16 tiles of queries
        tiny = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
        (site,) = rewriter.explain(fast)(tiny, tiny, tiny).sites
        assert site.kernel == "xla"  # so small that it is as fast
    (site,) = rewriter.explain(attention, target="a100", tune="off")(x, x, x).sites
    assert site.kernel != "hopper"
    assert "not a Hopper GPU" in dict(site.not_chosen)["hopper"]
    # Of "cuda" alone it is not known which GPU it is.
    exported = rewriter.export(attention, platforms=("cuda",))(X, X, X)
    assert exported.manifest["custom_calls"] == []


H100 = device.named("h100")


def prefixed(q, k, v, prefix):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    rows, keys = (jax.lax.broadcasted_iota(jnp.int32, s.shape[-2:], i) for i in (0, 1))
    mask = (keys <= rows) | (keys < prefix[:, None, None, None])
    return jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, s, -jnp.inf)), v
    )


@pytest.mark.parametrize("gradients", [False, True])
def test_it_is_chosen_for_causal_attention_with_a_prefix(gradients: bool) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    loss = lambda *given: prefixed(*given).astype(jnp.float32).sum()
    run = jax.grad(loss, (0, 1, 2)) if gradients else prefixed
    (site,) = rewriter.explain(run, target="h200", tune="off")(x, x, x, length).sites
    assert (site.kernel, site.origin) == ("hopper", "estimated")


@pytest.mark.parametrize(
    ("shape", "heads", "forward_ms", "both_ms"),
    [((4, 4096, 16, 128), 16, 0.456, 2.034), ((16, 1024, 8, 256), 1, 0.137, 0.777)],
)
def test_prefixes_are_estimated_as_they_were_measured(
    shape: tuple[int, ...], heads: int, forward_ms: float, both_ms: float
) -> None:
    """On an H200 (tests/bench/results/hopper_attention_h200.json), within a quarter."""
    q, k = (
        jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), jnp.bfloat16)
        for n in (shape[2], heads)
    )
    given = {
        "q": q,
        "k": k,
        "v": k,
        "prefix": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    }
    its = spec_of(registry().op("attention"), given, {"window": CAUSAL})
    for passes, ms in (("forward", forward_ms), ("forward_and_vjp", both_ms)):
        assert 0.75 < 1e3 * estimate(its, H200, passes)["hopper"] / ms < 1.25


def estimate(its: Spec, on: device.Device, passes: str) -> dict[str, float]:
    """Seconds by the models of all kernels that have one."""
    models = (k.speed.estimate for k in registry().kernels(its.op))
    found = [model(its, on, passes) for model in models if model is not None]
    assert len({times["xla"] for times in found}) == 1
    return {name: s for times in found for name, s in times.items()}


WIDTHS = {
    "full, 80 wide, 1k": ((16, 1024, 16, 80), None),
    "causal, 96 wide, 4k": ((4, 4096, 32, 96), 0),
    "full, 40 wide, 4k": ((4, 4096, 8, 40), None),
}
"""Shape, and what the window's right end is, of timed heads of other widths."""


@pytest.mark.parametrize("passes", ["forward", "forward_and_vjp"])
@pytest.mark.parametrize("case", WIDTHS)
def test_heads_of_other_widths_are_estimated_as_they_were_measured(
    case: str, passes: str
) -> None:
    """On an H200: within a quarter, and what is chosen is as fast as the other."""
    rows = json.loads(record.named("hopper_attention_h200").read_text())["rows"]
    ms: dict[str, float] = {}
    for row in rows:
        if (row["case"], row["pass"]) == (case, passes) and "ms" in row:
            name = "hopper" if "Tiles" in row["by"] else row["by"]
            ms[name] = min(row["ms"], ms.get(name, np.inf))
    shape, right = WIDTHS[case]
    times = estimate(spec(shape=shape, window=(None, right)), H200, passes)
    assert 0.75 < 1e3 * times["hopper"] / ms["hopper"] < 1.25
    if shape[1] % 2 == 0:  # or cuDNN was measured without what makes lengths even
        assert 0.75 < 1e3 * times["cudnn"] / ms["cudnn"] < 1.25
        best = min(("cudnn", "hopper"), key=lambda name: times[name])
        assert ms[best] < 1.1 * min(ms.values())


IN_PLACE = {
    "causal d128 1023": ((4, 1023, 16, 128), 0),
    "causal d128 2047": ((4, 2047, 16, 128), 0),
    "ViT-H 64x257x16x80": ((64, 257, 16, 80), None),
    "SigLIP 32x729x16x72": ((32, 729, 16, 72), None),
    "flux 1x1536x24x72": ((1, 1536, 24, 72), None),
    "d112 causal 2x2048x32": ((2, 2048, 32, 112), 0),
    "ViT-L 16x577x16x64": ((16, 577, 16, 64), None),
}


@pytest.mark.parametrize("passes", ["forward", "forward_and_vjp"])
@pytest.mark.parametrize("case", IN_PLACE)
def test_odd_lengths_and_widths_are_estimated_as_they_were_measured(
    case: str, passes: str
) -> None:
    """On an H100, within a third: nothing is copied for them."""
    rows = json.loads(record.named("choices_attention_h100").read_text())["rows"]
    name = {"forward": "forward", "forward_and_vjp": "both"}[passes]
    (us,) = (
        row["us"]["chosen"] for row in rows if (row["row"], row["pass"]) == (case, name)
    )
    shape, right = IN_PLACE[case]
    times = estimate(spec(shape=shape, window=(None, right)), H100, passes)
    assert 0.67 < 1e6 * times["hopper"] / us < 1.34


def test_copies_of_other_widths_are_estimated() -> None:
    """Those of heads that are no multiple of 8 wide."""
    times = [
        estimate(spec(shape=(16, 576, 16, width)), H200, "forward")["hopper"]
        for width in (120, 121)
    ]
    assert times[1] > 1.2 * times[0]


@pytest.mark.parametrize("differentiated", [0, 1])
@pytest.mark.parametrize("case", list(WIDTHS)[:2])
def test_it_is_chosen_for_heads_of_other_widths(
    case: str, differentiated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether cuDNN is there or not, which is given 730 rows for 729."""
    shape, right = WIDTHS[case]
    its = spec(shape=shape, window=(None, right), scale=0.1)
    kernels = registry().kernels("attention")
    for there in (no("cudnn", "is not there"), YES):
        monkeypatch.setattr(cudnn, "_asked", lambda _, there=there: there)
        choice = choose(its, Config(tune="off"), kernels, H200, differentiated)
        assert (choice.kernel, choice.origin) == ("hopper", "estimated")


def test_gradients_that_it_leaves_to_the_loop_are_estimated_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = spec(shape=(2, 2048, 4, 64), window=CAUSAL, scale=0.125)
    for loop in (False, True):
        if loop:
            monkeypatch.setattr(time_model, "fits_backward", lambda *_: no("", ""))
        forward, both = (estimate(its, H200, x) for x in ("forward", "forward_and_vjp"))
        gradients = both["hopper"] - forward["hopper"]
        assert (gradients > 0.5 * both["memory_bounded"]) == loop


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"values": 128}])
def test_gradients_of_capped_scores_and_wide_heads_are_ours(
    given: dict[str, Any],
) -> None:
    width = 192 if "values" in given else 64
    its = spec(shape=(2, 2048, 4, width), **given)
    for passes in ("forward", "forward_and_vjp"):
        times = estimate(its, H200, passes)
        assert times["hopper"] < 0.8 * times["xla"]


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_float32_takes_halves_unless_all_digits_are_asked_for(
    passes: str, precision: str
) -> None:
    """Others were measured there, and take longer than the kernel is estimated to."""
    given = {"window": CAUSAL, "scale": 0.125, "out_dtype": "float32"}
    if precision == "highest":
        given["precision"] = precision
    its = spec(jnp.float32, (2, 2048, 16, 64), **given)
    kernels, gradients = registry().kernels("attention"), int(passes == "both")
    choice = choose(its, Config(), kernels, H100, gradients)
    assert (choice.implementation.forward == "hopper") == (precision == "high")


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_float32_without_our_kernel_takes_what_was_faster_on_an_h100(
    passes: str,
) -> None:
    """The loop over blocks forward, and XLA with gradients."""
    rows = json.loads(record.named("choices_attention_h100").read_text())["rows"]
    name = "float32 causal 2x2048x16x64"
    (row,) = (r for r in rows if r["row"] == name and r["pass"] == passes)
    us = {"memory_bounded": row["us"]["chosen"], "xla": row["us"]["written"]}
    given = {"window": CAUSAL, "scale": 0.125, "out_dtype": "float32"}
    its = spec(jnp.float32, (2, 2048, 16, 64), **given)
    kernels = [k for k in registry().kernels("attention") if k.name != "hopper"]
    choice = choose(its, Config(), tuple(kernels), H100, int(passes == "both"))
    assert choice.implementation.forward == min(us, key=us.__getitem__)


DECODED = (
    ((32, 4096, 32, 8, 128), False, "hopper"),
    ((16, 8192, 32, 8, 128), False, "hopper"),
    ((1, 32768, 32, 8, 128), False, "hopper_decode"),  # few blocks: keys are split
    ((4, 16384, 64, 8, 128), False, "hopper_decode"),
    ((128, 1024, 16, 16, 64), True, "hopper"),
    ((16, 8192, 32, 8, 128), True, "hopper_decode"),  # lengths: unequal work
)
"""Batch, keys, heads, key heads, width; whether there are lengths; what was fastest."""


@pytest.mark.parametrize(("sizes", "lengths", "kernel"), DECODED)
def test_decoding_splits_keys_where_blocks_are_few(
    sizes: tuple[int, ...], lengths: bool, kernel: str
) -> None:
    b, s, n, heads, h = sizes
    arrays = {"q": (b, 1, n, h), "k": (b, s, heads, h), "v": (b, s, heads, h)}
    given = {x: jax.ShapeDtypeStruct(a, jnp.bfloat16) for x, a in arrays.items()}
    if lengths:
        given["kv_lengths"] = jax.ShapeDtypeStruct((b,), jnp.int32)
    its = spec_of(registry().op("attention"), given, {})
    found = estimate(its, device.named("h100"), "forward")
    assert min(found, key=lambda name: found[name]) == kernel
