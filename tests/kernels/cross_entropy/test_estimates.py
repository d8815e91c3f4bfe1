"""Which implementation of a loss is estimated to be the fastest on a known device."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.shared import work_stealing
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry

HOPPER = device.named("h100")


def linear(n: int, k: int, v: int, **params: object) -> Spec:
    shapes = {"x": (n, k), "w": (k, v), "labels": (n,)}
    return _spec("linear_cross_entropy", shapes, "bfloat16", params)


def given(n: int, v: int, dtype: str, **params: object) -> Spec:
    shapes = {"logits": (n, v), "labels": (n,)}
    return _spec("cross_entropy", shapes, dtype, params)


def _spec(name: str, shapes: dict, dtype: str, params: dict) -> Spec:
    like = {
        n: jax.ShapeDtypeStruct(s, "int32" if n == "labels" else dtype)
        for n, s in shapes.items()
    }
    return spec_of(registry().op(name), like, params)


LOGS = {"of_log_probabilities": True}
CHOICES = [
    (linear(8192, 768, 50257), 1, "hopper"),
    (linear(8192, 768, 50257), 0, "hopper"),  # aligned products
    (linear(8192, 4096, 128256), 1, "hopper"),
    (linear(32768, 2560, 128256), 0, "hopper"),  # a fifteenth of the memory
    (linear(8192, 768, 50257, soft_cap=30.0), 1, "memory_bounded"),
    (linear(8192, 768, 30528), 0, "xla"),  # aligned, and not measured
    (linear(128, 768, 1000), 1, "xla"),  # a few launches
    (given(8192, 50257, "bfloat16", **LOGS), 1, "memory_bounded"),
    (given(8192, 50257, "float32"), 1, "memory_bounded"),
    (given(8192, 50257, "float32", outside="zero"), 1, "xla"),  # nothing is scattered
    (given(8192, 50257, "float32"), 0, "xla"),
]


@pytest.mark.parametrize(("spec", "gradients", "kernel"), CHOICES)
def test_choices_on_an_h100(spec: Spec, gradients: int, kernel: str) -> None:
    kernels, h100 = registry().kernels(spec.op), device.named("h100")
    choice = choose(spec, Config(), kernels, h100, gradients)
    assert (choice.kernel, choice.origin) == (kernel, "estimated")


@pytest.mark.parametrize("name", ["h100", "a100", "tpu_v5e", "tpu_v5p"])
@pytest.mark.parametrize("v", [32000, 50257, 128256, 262144])
def test_blocks_are_large_and_fit(name: str, v: int) -> None:
    """Enough rows for the weights' gradients; a small part of the memory."""
    here = device.named(name)
    config = chunks.default(linear(8192, 2048, v), here)
    classes = chunks.padded(v, config)
    rows = chunks.whole_rows(8192, classes, 2, config)
    assert rows >= 1024
    assert config.budget <= here.memory // 16
    assert rows * classes * 2 <= 1.01 * config.budget
    assert classes % 8 == 0
    assert classes - v < 128


def test_logits_lie_in_place_where_memory_is_short() -> None:
    """Where the gradient of the weights in float32 is a large part of the memory."""
    here, spec = device.named("h100"), linear(8192, 8192, 256000)
    assert chunks.default(spec, here).beside == 0
    for other in (linear(8192, 4096, 128256), linear(4096, 8192, 256000)):
        assert chunks.default(other, here).beside is None
    least = chunks.least_memory(linear(8192, 4096, 128256), chunks.LARGE)
    assert 1024 <= least.beside < 4096


def test_logits_lie_in_place_where_few_rows_are_computed_twice() -> None:
    space, here = registry().kernel("linear_cross_entropy", "hopper").space, HOPPER
    twice = 320 if work_stealing.AVAILABLE else 384
    for sizes, rows in {
        (8192, 4096, 128256): twice, (4096, 4096, 128256): 0,
        (8192, 2304, 128256): None, (32768, 2560, 128256): None,
        (8192, 768, 50257): None,
    }.items():  # fmt: skip
        config = space.default(linear(*sizes), here)
        held = None if config.beside is None else sizes[1] + config.beside
        assert held == (None if rows is None else sizes[0] - rows), sizes


@pytest.mark.skipif(not work_stealing.AVAILABLE, reason="jax has no such references")
def test_one_kernel_has_a_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    space = registry().kernel("linear_cross_entropy", "hopper").space
    use, part = linear(8192, 4096, 128256), "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    one = space.default(use, HOPPER)
    assert one.one_kernel
    for kind in (part, "cuda"):
        some = dataclasses.replace(HOPPER, kind=kind)
        assert not space.default(use, some).one_kernel
        assert not space.fits(one, use, some).ok
    for sizes in ((8192, 4160, 128256), (8192, 4096, 128272), (8200, 4096, 128256)):
        assert not space.default(linear(*sizes), HOPPER).one_kernel
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "20")
    assert not space.default(use, HOPPER).one_kernel


@pytest.mark.skipif(not work_stealing.AVAILABLE, reason="jax has no such references")
def test_blocks_whose_cotangents_are_in_place_take_an_eighth() -> None:
    """Blocks of 2048 rows add up gradients 16 times; these are a quarter as many."""
    space = registry().kernel("linear_cross_entropy", "hopper").space
    for sizes, blocks in {
        (32768, 2560, 128256): 4, (8192, 768, 50257): 1, (8192, 2304, 128256): 2,
    }.items():  # fmt: skip
        config = space.default(linear(*sizes), HOPPER)
        classes = chunks.padded(sizes[2], config)
        rows = chunks.whole_rows(sizes[0], classes, 2, config)
        assert sizes[0] // rows == blocks
        sums = 4 * sizes[1] * classes
        if blocks == 4:  # else no larger than what two arrays took before
            assert 2 * rows * classes + sums < sizes[0] * sizes[2]
        assert config.of_passing.budget == 1 << 29
    smoothed = space.default(linear(8192, 768, 50257, label_smoothing=0.1), HOPPER)
    assert smoothed.budget == 1 << 29  # the mean of logits is another reader of them


def test_where_xla_needs_too_much_memory_blocks_are_chosen() -> None:
    spec, here = linear(65536, 2048, 128256), device.named("tpu_v5e")
    choice = choose(spec, Config(), registry().kernels(spec.op), here, 1)
    assert choice.kernel == "memory_bounded"
    assert "temporary arrays" in dict(choice.not_chosen)["xla"]


def test_huge_logits_are_not_left_to_a_gpu_of_unknown_size() -> None:
    kernels, some = registry().kernels("linear_cross_entropy"), Device("a GPU", "cuda")
    for rows, kernel in ((8192, "xla"), (32768, "memory_bounded")):
        spec = linear(rows, 2560, 128256)
        assert choose(spec, Config(), kernels, some, 1).kernel == kernel


def test_each_size_is_divided_into_equal_parts() -> None:
    for n, most in ((1, 1), (7, 3), (8184, 5336), (100, 64), (50304, 4096)):
        size = chunks.equal(n, most)
        assert size <= most
        assert -(-n // size) == -(-n // most)
