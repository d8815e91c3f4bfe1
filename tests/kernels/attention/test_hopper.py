"""Attention on Hopper: what it takes, and its configs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import (
    backward_config,
    config,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.extra_operands import Extra
from rewriter.kernels.attention.reference import reference
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.support.kernels.float64 import float64

H200 = device.named("h200")
CAUSAL, NONE = (None, 0), (None, None)


def spec(
    dtype: Any = jnp.bfloat16,
    shape: tuple[int, ...] = (2, 256, 4, 64),
    more: tuple[str, ...] = (),
    values: int = 0,
    **params: Any,
) -> Spec:
    x = jax.ShapeDtypeStruct(shape, dtype)
    v = jax.ShapeDtypeStruct((*shape[:3], values or shape[3]), dtype)
    operands = {"q": x, "k": x, "v": v}
    operands |= {n: jax.ShapeDtypeStruct((4,), jnp.float32) for n in more}
    return spec_of(registry().op("attention"), operands, params)


# ---------------------------------------------------------------- what it takes
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float64), "16-bit float, not float"),
        (spec(more=("dropout",)), "does not take dropout"),
        (spec(more=("dropout", "scale_factor")), "does not take dropout, scale_factor"),
        (spec(more=("prefix",), window=(9, 0)), "where windows have no left end"),
        (spec(shape=(2, 256, 4, 320)), "heads of q are 320 wide, more than 256"),
        (spec(values=257), "heads of v are 257 wide"),
        (spec(shape=(2, 0, 4, 64)), "an axis of size 0"),
        (spec(scale=-1.0), "scale is -1.0, not positive"),
        (spec(softcap=-3.0), "softcap is -3.0"),
        (spec(softcap=1e6), "small scores would be inexact"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize(
    "given",
    [
        spec(),
        spec(jnp.float16),
        spec(out_dtype="float32"),
        spec(more=("kv_lengths", "offset", "prefix")),
        spec(more=("prefix",), window=CAUSAL),
        spec(shape=(1, 1, 3, 80)),
        spec(shape=(1, 7, 3, 192), values=128),
        spec(shape=(2, 256, 4, 72)),
        spec(shape=(1, 7, 3, 5), values=249),
        spec(softcap=30.0, window=(100, 3), shift=-5, empty_rows="mean"),
    ],
)
def test_what_it_takes(given: Spec) -> None:
    assert hopper.supports(given).ok, hopper.supports(given)
    found, pruned = worth_measuring(
        registry().kernel("attention", "hopper").space, given, H200, 24
    )
    assert found[0] == hopper.default(given, H200), pruned
    assert all(hopper.fits(c, given, H200).ok for c in found)


def test_the_rule_of_thumb_fits_all_widths() -> None:
    for h, e in itertools.product(range(16, 257, 16), repeat=2):
        for window in (NONE, CAUSAL):
            given = spec(shape=(1, 4096, 2, h), values=e, window=window)
            tiles = hopper.default(given, H200)
            assert hopper.fits(tiles, given, H200).ok, (h, e, tiles)


def test_programs_are_as_many_as_processors() -> None:
    for kind, count in (("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114)):
        there = device.of(kind, "cuda")
        assert hopper.default(spec(), there).programs == count
        assert hopper.backward_default(spec(), there).programs == count
        assert {c.programs for c in hopper.configs(spec(), there)} == {0, count}
        assert {c.programs for c in hopper.backward_configs(spec(), there)} == {count}
    assert hopper.default(spec(), H200).programs == 132


def test_it_runs_on_hopper_gpus_alone() -> None:
    for name in ("h100", "h200"):
        assert hopper.runs_on(device.named(name)).ok
    assert hopper.runs_on(device.Device("cuda", "cuda")).ok  # not known yet
    for name in ("a100", "b200", "l40s"):
        verdict = hopper.runs_on(device.named(name))
        assert "not a Hopper GPU" in verdict.reasons[0].text


def test_configs_that_cannot_run_are_pruned() -> None:
    many = Tiles(160, 3, 2)
    verdict = config.fits_widths(many, 128, 128)
    assert not verdict.ok
    assert "KiB of shared memory of 227 KiB" in verdict.reasons[0].text
    assert config.shared_memory(many, 128, 128, False) > 227 << 10
    assert "registers" in config.fits_widths(Tiles(192, 2, 3), 64, 64).reasons[0].text
    assert "warpgroups" in config.fits_widths(Tiles(64, 2, 4), 64, 64).reasons[0].text
    assert "multiple of 16" in config.fits_widths(Tiles(72), 64, 64).reasons[0].text
    assert "stages" in config.fits_widths(Tiles(64, 1), 64, 64).reasons[0].text
    # The result of other widths than q's has memory of its own.
    assert config.fits_widths(Tiles(128, 3), 128, 128).ok
    assert not config.fits_widths(Tiles(128, 3), 128, 112).ok


def test_configs_of_the_backward_that_cannot_run_are_pruned() -> None:
    def why(*given: Any, width: int = 128, **named: Any) -> str:
        verdict = backward_config.fits_backward_widths(
            BackwardTiles(*given, **named), width, width
        )
        return " ".join(r.text for r in verdict.reasons)

    assert why() == ""
    assert why(64, 128, 3, width=64) == ""
    assert "registers" in why(128)
    assert "shared memory" in why(64, 128, 3)
    assert "multiple of 64" in why(96)
    assert why(32, 32) == ""
    assert "3 warpgroups, not 2" in why(64, 64, 2, 3, divided=True, width=64)
    assert "shared memory" in why(64, 64, 2, divided=True, width=256)
    assert why(64, 64, 2, divided=True, v_stages=1, width=256) == ""
    assert "fewer than 2" in why(stages=1)
    assert "registers" in why(width=256)
    if jax.__version_info__ < (0, 11):
        assert "cannot add up dq" in why(fused=True)
        return
    assert why(fused=True) == ""
    assert "by 2 warpgroups" in why(64, 64, 2, 3, fused=True, width=64)
    assert hopper.fits_backward(BackwardTiles(), spec(softcap=3.0), H200).ok


# --------------------------------------------------------- in programs, anywhere
def attention(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def loss(q, k, v):
    return attention(q, k, v).astype(jnp.float32).sum()


def scanned(q, k, v):
    return jax.lax.scan(lambda x, _: (attention(x, k, v), None), q, length=2)[0]


PROGRAMS = {
    "plain": attention,
    "jit": jax.jit(attention),
    "vmap": lambda q, k, v: jax.vmap(attention)(q[None], k[None], v[None]),
    "scan": scanned,
    "gradient": jax.grad(loss, (0, 1, 2)),
}
FORCED = {"attention": "hopper"}
X = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)


def test_kernels_choose_tiles_that_fit_if_no_one_does() -> None:
    """As where a kernel is called by hand."""
    for h, e in ((64, 64), (192, 128), (256, 256), (128, 256)):
        assert config.fits_widths(config.first_fitting(h, e), h, e).ok
        backward = backward_config.first_fitting_backward(h, e)
        assert backward is not None
        assert backward_config.fits_backward_widths(backward, h, e).ok
    assert (
        backward_config.first_fitting_backward(256, 256, Extra((4, 4), slopes=True))
        is None
    )


def test_other_gpus_are_told_why() -> None:
    with pytest.raises(
        rewriter.KernelError, match="A100-SXM4-80GB is not a Hopper GPU"
    ):
        rewriter.explain(attention, target="a100", implementation=FORCED)(X, X, X)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it runs there")
def test_where_it_cannot_run_the_plain_form_does() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), X.shape, X.dtype) for i in range(3))
    fast = rewriter.optimize(attention, implementation=FORCED)
    got = np.asarray(fast(q, k, v), np.float32)
    want = np.asarray(attention(q, k, v), np.float32)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


LIMITS = {"bfloat16": 4e-3, "float16": 6e-4}
"""Of the relative error: half a unit in the last place, of weights and result."""

ON_HOPPER = jax.default_backend() == "gpu" and hopper.runs_on(device.attached()).ok
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs an NVIDIA Hopper GPU")


def operands(
    shape: tuple[int, ...], dtype: str, times: float = 1
) -> tuple[jax.Array, ...]:
    b, t, s, n, heads, h, e = shape
    sizes = ((b, t, n, h), (b, s, heads, h), (b, s, heads, e), (b, t, n, e))
    made = (jax.random.normal(jax.random.key(i), x) for i, x in enumerate(sizes))
    scaled = (x * times if i == 0 else x for i, x in enumerate(made))
    return tuple(x.astype(dtype) for x in scaled)


def split(params: dict[str, Any], h: int) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = {
        x: jnp.asarray(params[x], jnp.int32)
        for x in ("kv_lengths", "offset", "prefix")
        if x in params
    }
    rest = {x: v for x, v in params.items() if x not in (*numbers, "times")}
    return numbers, {"scale": h**-0.5, **rest}


def exact(q: Any, k: Any, v: Any, **given: Any) -> np.ndarray:
    with float64():
        wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v)]
        return np.asarray(reference(*wide, **given))


def exact_gradients(q: Any, k: Any, v: Any, up: Any, **given: Any) -> list[np.ndarray]:
    """The result and the gradients of q, k and v."""
    with float64():
        wide = [np.asarray(x, np.float64) for x in (q, k, v, up)]
        out, back = jax.vjp(lambda *x: reference(*x, **given), *wide[:3])
        return [np.asarray(x) for x in (out, *back(wide[3]))]


def error(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    assert (np.isnan(got) == np.isnan(want)).all()
    got, want = (np.nan_to_num(x, nan=0.0) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
