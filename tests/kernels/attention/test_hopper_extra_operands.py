"""Attention on Hopper with operands beside q, k and v: segments, slopes, tables."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import (
    backward_config,
    backward_kernel,
    block_masks,
    config,
    forward_kernel,
    terms,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.extra_operands import beside_in, beside_of
from rewriter.kernels.attention.reference import reference, usual, visible
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    exact,
    needs_hopper,
    operands,
)
from tests.slow import first
from tests.support.kernels import bits, simulator
from tests.support.kernels.float64 import float64

pytestmark = pytest.mark.once

Array = np.ndarray
H200 = device.named("h200")
LOWEST = float(np.finfo(np.float32).min)


def spec(width: int = 64, values: int = 0, **more: tuple[tuple[int, ...], str]) -> Spec:
    q = jax.ShapeDtypeStruct((2, 300, 4, width), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((2, 300, 4, values or width), jnp.bfloat16)
    given = {"q": q, "k": q, "v": v}
    given |= {n: jax.ShapeDtypeStruct(*x) for n, x in more.items()}
    return spec_of(registry().op("attention"), given, {})


TABLE = ((2, 4, 300, 300), "float32")
MASK = ((2, 1, 300, 300), "bool")


@pytest.mark.parametrize(
    "given",
    [
        spec(bias=TABLE),
        spec(128, bias=TABLE, mask=MASK),
        spec(256, bias=((1, 1, 1, 300), "bfloat16")),
        spec(mask=((2, 1, 300, 1), "bool")),
        spec(128, q_segments=((2, 300), "int32"), kv_segments=((1, 300), "int32")),
        spec(128, alibi=((4,), "float32"), sinks=((4,), "bfloat16")),
    ],
)
def test_what_it_takes(given: Spec) -> None:
    assert hopper.supports(given).ok, hopper.supports(given)
    of = registry().kernel("attention", "hopper")
    for space in (of.space, of.backward_space):
        found, _ = worth_measuring(space, given, H200, 24)
        assert space.default(given, H200) in found
        assert space.fits(space.default(given, H200), given, H200).ok


def test_gradients_take_blocks_of_128_keys_where_those_were_faster() -> None:
    lengths = ((2, 300), "int32")
    for width, given, keys in (
        (128, {"alibi": ((4,), "float32")}, 128),
        (128, {"bias": ((1, 4, 1, 300), "float32")}, 128),
        (128, {"q_segments": lengths, "kv_segments": lengths}, 64),
        (128, {"mask": MASK}, 64),
        (64, {"mask": MASK}, 128),
        (256, {"alibi": ((4,), "float32")}, 64),
    ):
        tiles = hopper.backward_default(spec(width, **given), H200)
        assert tiles.keys == keys, given
        assert hopper.fits_backward(tiles, spec(width, **given), H200).ok


def test_what_leaves_no_memory_is_refused() -> None:
    verdict = hopper.supports(spec(256, 240, bias=TABLE, mask=MASK))
    assert "KiB of shared memory of 227 KiB" in verdict.reasons[0].text


def test_tables_take_shared_memory() -> None:
    beside = beside_in(spec(128, bias=TABLE))
    assert config.fits_widths(Tiles(128), 128, 128).ok
    assert not config.fits_widths(Tiles(128), 128, 128, beside).ok
    assert config.fits_widths(Tiles(64), 128, 128, beside).ok
    verdict = config.fits_widths(Tiles(80), 64, 64, beside)
    assert "80 is no multiple of 32" in verdict.reasons[0].text
    fits = backward_config.fits_backward_widths
    assert fits(BackwardTiles(64, 64), 128, 128, beside).ok
    assert backward_config.table_stages(BackwardTiles(), 64, 64, beside) == 2
    wide = BackwardTiles(64, 128, 3)
    assert fits(wide, 64, 64).ok
    assert not fits(wide, 64, 64, beside).ok


FORMS: dict[str, dict[str, Any]] = {
    "bias": {"bias": ((1, 2, 130, 200), "float32")},
    "narrow": {
        "bias": ((2, 1, 130, 200), "bfloat16"), "mask": ((2, 1, 1, 200), "bool"),
    },
    "keys": {"bias": ((1, 2, 1, 200), "float32"), "alibi": ((2,), "float32")},
    "thin": {"bias": ((2, 2, 130, 1), "bfloat16"), "mask": ((1, 1, 1, 1), "bool")},
    "mask": {"mask": ((2, 2, 130, 200), "bool")},
    "segments": {
        "q_segments": ((1, 130), "int32"), "kv_segments": ((2, 200), "int32"),
        "alibi": ((2,), "float32"),
    },
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_memory_is_counted_as_it_is_taken(name: str, turned: bool) -> None:
    given = {n: jnp.zeros(*x) for n, x in FORMS[name].items()}
    found, arrays = terms.terms_of(130, 200, **given)
    beside = beside_of(given)
    if turned:
        (found, arrays), beside = terms.transposed(found, arrays), beside.transposed
    scratch = found.scratch(2, 3, 64)
    taken = sum(np.prod(x.shape) * x.dtype.itemsize for x in scratch.values())
    assert taken == beside.nbytes(2, 192, 64)
    assert set(scratch) == set(arrays) - {"slopes"}


def check(mask: Mask, some: Any, every: Any, table: Array, cut: Any) -> None:
    """Whole blocks are seen whole by all heads; what is left out is seen by none."""
    rows, keys = cut
    for b, n, i in np.ndindex(table.shape[:3]):
        before = blocks_of(mask, i * rows, rows, keys, mask.shift)
        r = block_masks.within(before, *map(int, table[b, n, i]))
        assert 0 <= r.start <= r.whole <= r.part <= r.end <= -(-mask.s // keys)
        assert r.count >= 1
        tile = np.asarray(some)[b, n, i * rows : (i + 1) * rows]
        assert not tile[:, : r.start * keys].any()
        assert not tile[:, r.end * keys :].any()
        tile = np.asarray(every)[b, n, i * rows : (i + 1) * rows]
        inside = tile[:, r.whole * keys : r.part * keys]
        assert inside.all()
        assert inside.shape[1] == (r.part - r.whole) * keys


def test_blocks_that_segments_leave_against_a_table() -> None:
    random = np.random.default_rng(0)
    packed = lambda n: np.sort(random.integers(0, 4, (2, n)), 1).astype(np.int32)
    shuffled = lambda n: random.integers(0, 3, (2, n)).astype(np.int32)
    apart = lambda n: np.full((2, n), n, np.int32)
    for t, s, *cut in ((300, 260, 64, 32), (100, 500, 128, 64), (1, 70, 192, 32)):
        for draw in (packed, shuffled, apart):
            q, k = draw(t), draw(s)
            table = np.asarray(block_masks.table(2, t, s, *cut, segments=(q, k)))
            for window, shift in (((None, None), 0), (CAUSAL, 40), ((30, 5), -9)):
                given = {"window": window, "shift": shift}
                seen = visible(t, s, q_segments=q, kv_segments=k, **given)
                mask = Mask(t, s, *window, shift, more=True)
                check(mask, seen, seen, table, cut)


@pytest.mark.parametrize("form", [(2, 3, 150, 300), (1, 3, 1, 300), (2, 1, 150, 1)])
def test_blocks_that_masks_leave_against_a_table(form: tuple[int, ...]) -> None:
    n, rows, keys = np.ogrid[: form[1], : form[2], : form[3]]
    near = np.broadcast_to(np.abs(keys - rows - 20 * n) < 90, form)
    mask, cut = Mask(150, 300, more=True), (64, 32)
    for seen in (near, np.random.default_rng(0).random(form) < 0.9):
        wide = np.broadcast_to(seen, (*form[:2], 150, 300))
        table = np.asarray(block_masks.table(form[0], 150, 300, *cut, seen))
        check(mask, wide, wide, table, cut)
        of_all = np.asarray(
            block_masks.table(form[0], 150, 300, *cut, seen, group=form[1])
        )
        check(mask, wide.any(1)[:, None], wide.all(1)[:, None], of_all, cut)


def test_masks_of_few_blocks_are_read_whole() -> None:
    assert block_masks.table(1, 150, 200, 64, 32, np.ones((1, 1, 1, 200), bool)) is None
    assert (
        block_masks.table(1, 150, 300, 64, 32, np.ones((1, 1, 1, 300), bool))
        is not None
    )


def test_packed_segments_read_their_own_blocks() -> None:
    ids = np.repeat(np.arange(4, dtype=np.int32), 1024)[None]
    table = np.asarray(block_masks.table(1, 4096, 4096, 128, 128, segments=(ids, ids)))
    np.testing.assert_array_equal(table[0, 0, 9], [8, 8, 16, 16])
    later = np.roll(ids, -64, 1)
    table = np.asarray(
        block_masks.table(1, 4096, 4096, 128, 128, segments=(later, ids))
    )
    np.testing.assert_array_equal(table[0, 0, 7], [0, 16, 16, 16])
    causal = np.tril(np.ones((1, 1, 1024, 1024), bool))
    table = np.asarray(block_masks.table(1, 1024, 1024, 128, 64, causal))
    np.testing.assert_array_equal(table[0, 0, 5], [0, 0, 10, 12])


LOWERED: dict[str, tuple[int, dict[str, Any], Tiles]] = {
    name: (64, given, Tiles(64, 2, 3)) for name, given in FORMS.items()
} | {
    "wide": (256, FORMS["narrow"], Tiles(32, 2, 2, turns=False)),
    "wide and mask": (256, FORMS["mask"], Tiles(32, 2, 2, turns=False)),
    "tables": (64, FORMS["bias"], Tiles(64, 2, 3)),
    "sinks": (128, {"sinks": ((2,), "bfloat16")}, Tiles(160, 2, 2)),
}


@pytest.mark.parametrize("name", first(5, LOWERED))
def test_it_is_lowered_without_a_gpu(name: str) -> None:
    h, more, tiles = LOWERED[name]
    given = {n: jax.ShapeDtypeStruct(*x) for n, x in more.items()}
    sizes = {"q": (2, 130, 2, h), "k": (2, 200, 2, h), "v": (2, 200, 2, h)}
    given |= {n: jax.ShapeDtypeStruct(x, jnp.bfloat16) for n, x in sizes.items()}

    def run(given: Any, up: Any) -> Any:
        both = {**given, "window": CAUSAL, "empty_rows": "mean", "scale": 0.125}
        out, kept = hopper.forward(**both, residuals=True, config=tiles)
        tile = BackwardTiles(64, 64, 2, tables=name == "tables")
        if h > 128:
            tile = BackwardTiles(32, 32, 2, divided=True)
        return hopper.backward(
            **both, out=out, residuals=kept, cotangent=up, config=tile
        )

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(given, given["q"])
    moving = {n for n, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    grads = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    assert {n: x.shape for n, x in grads.items()} == {n: given[n].shape for n in moving}
    text = exported.mlir_module()
    more = {"tables": ["dbias"], "keys": ["key_sums", "slope_sums"]}.get(name, [])
    named = [f"attention_{x}" for x in ("dk_dv", "dq", *more)]
    assert all(x in text for x in named)


def test_what_no_one_asks_for_is_not_computed() -> None:
    """Biases of keys and slopes seldom have gradients: their kernels are left out."""
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    given = {"q": x, "k": x, "v": x, "alibi": jax.ShapeDtypeStruct((2,), jnp.float32)}
    given["bias"] = jax.ShapeDtypeStruct((1, 2, 1, 128), jnp.float32)

    def run(given: Any, up: Any, names: tuple[str, ...]) -> Any:
        out, kept = hopper.forward(**given, residuals=True)
        grads = hopper.backward(**given, out=out, residuals=kept, cotangent=up)
        return {n: grads[n] for n in names}

    kernels = {"alibi": "slope_sums", "bias": "key_sums"}
    for asked in (("q",), ("q", "alibi"), ("q", "bias")):
        one = jax.jit(lambda given, up, asked=asked: run(given, up, asked))
        text = jax.export.export(one, platforms=["cuda"])(given, x).mlir_module()
        for name, kernel in kernels.items():
            assert (f"attention_{kernel}" in text) == (name in asked)


# --------------------------------------------------------------------- numbers
Case = tuple[tuple[int, ...], dict[str, Any], Tiles | None, BackwardTiles]
CASES: dict[str, Case] = {  # b, t, s, n, heads of k, h, e; drawn and given; configs
    "segments": (
        (2, 300, 200, 2, 1, 32, 32), {"segments": "packed", "window": CAUSAL},
        Tiles(64, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "pair": (
        (2, 130, 140, 2, 2, 32, 32),
        {"bias": ((1, 2, 130, 140), "float32"), "mask": (2, 1, 1, 140)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "slopes and sinks": (
        (2, 200, 150, 4, 2, 32, 32),
        {"alibi": (4,), "sinks": (4,), "window": (70, 3), "offset": (-90, 10)},
        Tiles(64, 3, 2, 3, False), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "table of masks": (
        (1, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 4, 130, 140), "hidden": 7, "empty_rows": "mean"},
        Tiles(64, 2, 3, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "blocks of masks": (
        (1, 130, 540, 4, 2, 32, 32), {"near": (1, 4, 130, 540), "empty_rows": "zero"},
        Tiles(32, 3, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "lowest": (
        (2, 100, 140, 2, 1, 32, 32),
        {"bias": ((2, 1, 1, 140), "float32"), "lowest": True},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "keys that pad": (
        (2, 130, 540, 2, 1, 32, 32),
        {"bias": ((1, 1, 1, 540), "float32"), "near": (2, 1, 1, 540),
         "window": (400, 400), "alibi": (2,)},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "segments in no order": (
        (2, 200, 260, 2, 1, 32, 32),
        {"segments": "shuffled", "window": (50, 20), "empty_rows": "mean"},
        Tiles(64, 2, 3, 3), BackwardTiles(64, 64, 2, 3, 3),
    ),
    "segments of their own": (
        (1, 150, 260, 2, 2, 32, 32), {"segments": "apart", "empty_rows": "zero"},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "warpgroups without rows": (
        (2, 300, 140, 2, 2, 32, 32),
        {"bias": ((1, 2, 300, 140), "float32"), "mask": (2, 1, 1, 140)},
        Tiles(64, 2, 3, 2), BackwardTiles(64, 64, 2, 3, 2),
    ),
    "soft cap": (
        (1, 130, 140, 4, 2, 32, 32),
        {"bias": ((1, 4, 130, 140), "float32"), "mask": (1, 4, 130, 140),
         "sinks": (4,), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "soft cap and segments": (
        (2, 150, 140, 2, 2, 32, 32),
        {"segments": "packed", "softcap": 1.0, "alibi": (2,), "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "wide": (
        (1, 130, 140, 4, 2, 192, 128),
        {"bias": ((1, 4, 130, 140), "bfloat16"), "mask": (1, 1, 130, 140),
         "alibi": (4,), "sinks": (4,), "softcap": 2.0, "empty_rows": "zero"},
        Tiles(32, 2, 2, 2), BackwardTiles(64, 32, 2, 2, 2, divided=True, v_stages=1),
    ),
    "wide and segments": (
        (2, 150, 140, 2, 1, 64, 128),
        {"segments": "packed", "bias": ((2, 1, 150, 1), "float32"), "window": CAUSAL},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "rows without keys, nan": (
        (1, 130, 140, 2, 2, 32, 32), {"mask": (1, 2, 130, 140), "hidden": 7},
        Tiles(128, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "rows without keys, sinks": (
        (1, 130, 140, 2, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "sinks": (2,)},
        Tiles(128, 2, 2, 2), BackwardTiles(64, 128, 2, 2, 2),
    ),
    "thin ones": (
        (2, 130, 140, 2, 2, 32, 32),
        {"bias": ((2, 1, 130, 1), "bfloat16"), "mask": (1, 2, 1, 140),
         "empty_rows": "zero", "hidden": 140},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "all at once": (
        (2, 203, 150, 4, 2, 64, 32),
        {"bias": ((1, 4, 203, 150), "bfloat16"), "mask": (2, 1, 203, 150),
         "segments": "packed", "alibi": (4,), "sinks": (4,), "window": (100, None),
         "shift": -30, "kv_lengths": (150, 77)},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
}  # fmt: skip


def drawn(case: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The other operands and parameters of a case, as numpy arrays."""
    random = np.random.default_rng(1)
    b, t, s, _, _, h, _ = shape
    case = dict(case)
    made: dict[str, Any] = {"scale": h**-0.5}
    if "bias" in case:
        form, dtype = case.pop("bias")
        made["bias"] = np.asarray(random.normal(size=form), jnp.dtype(dtype))
        if case.pop("lowest", False):  # of all keys of the first batch entry
            hidden = random.random(form) < 0.3
            hidden[0] = True
            made["bias"] = np.where(hidden, np.float32(LOWEST), made["bias"])
    if "mask" in case:
        made["mask"] = random.random(case.pop("mask")) < 0.5
        made["mask"][..., : case.pop("hidden", 0), :] = False
        made["mask"][..., case.pop("keys", None) or shape[2] :] = False
    if "near" in case:  # blocks that are hidden, whole and in between
        form = case.pop("near")
        n, rows, keys = np.ogrid[: form[1], : form[2], : form[3]]
        near = (keys - rows * 2 + 50 * n < 260) & (keys >= 70)
        made["mask"] = np.broadcast_to(near, form)
    if "segments" in case:
        made |= segments(case.pop("segments"), random, (b, t), (b, s))
    for name in ("alibi", "sinks"):
        if name in case:
            made[name] = random.uniform(0.1, 1.0, case.pop(name)).astype(np.float32)
    for name in ("kv_lengths", "offset"):
        if name in case:
            made[name] = np.asarray(case.pop(name), np.int32)
    return made | case


def segments(
    kind: str, random: np.random.Generator, *forms: tuple[int, int]
) -> dict[str, Array]:
    """Four packed documents; segments in no order; some that have nothing in common."""
    q, k = (random.integers(0, 4, form).astype(np.int32) for form in forms)
    if kind == "packed":
        q, k = np.sort(q, 1), np.sort(k, 1)
    return {"q_segments": q + 9 * (kind == "apart"), "kv_segments": k}


def wanted(q: Any, k: Any, v: Any, up: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The result and gradients in float64."""
    moving = {"q": q, "k": k, "v": v}
    moving |= {n: given[n] for n in ("bias", "alibi", "sinks") if n in given}
    rest = {n: x for n, x in given.items() if n not in moving}
    with float64():
        wide = {n: np.asarray(x, np.float64) for n, x in moving.items()}

        @jax.jit
        def both(wide: Any, up: Any) -> Any:
            out, back = jax.vjp(lambda x: reference(**x, **rest), wide)
            return {"out": out, **back(up)[0]}

        return both(wide, np.asarray(up, np.float64))


TABLES: dict[str, Case] = {  # whose biases have cotangents by the kernel
    "for each": (
        (2, 130, 140, 2, 1, 32, 32), {"bias": ((2, 2, 130, 140), "bfloat16")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "for a head": (
        (3, 200, 150, 2, 2, 32, 64),
        {"bias": ((1, 2, 200, 150), "float32"), "window": CAUSAL,
         "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "for a batch entry": (
        (2, 70, 270, 4, 2, 32, 32),
        {"bias": ((2, 1, 70, 270), "bfloat16"), "window": (100, 30), "alibi": (4,),
         "offset": (-9, 150), "kv_lengths": (200, 270)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=0),
    ),
    "for all": (
        (3, 260, 70, 4, 2, 32, 32),
        {"bias": ((1, 1, 260, 70), "bfloat16"), "mask": (3, 1, 260, 70),
         "segments": "packed", "softcap": 2.0, "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, warpgroups=3, programs=4),
    ),
    "for all, large": (
        (41, 130, 64, 1, 1, 32, 32),
        {"bias": ((1, 1, 130, 64), "float16")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=4),
    ),
}  # fmt: skip


COLUMNS: dict[str, Case] = {  # whose biases of keys, or slopes, have cotangents
    "of keys, for all": (
        (2, 130, 140, 4, 2, 32, 32),
        {"bias": ((1, 1, 1, 140), "float32"), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "of keys, for each": (
        (2, 150, 270, 4, 2, 32, 64),
        {"bias": ((2, 4, 1, 270), "bfloat16"), "window": (100, 30), "sinks": (4,),
         "offset": (-9, 150), "kv_lengths": (200, 270)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, warpgroups=3, programs=2),
    ),
    "of keys, beside segments": (
        (2, 200, 150, 2, 1, 32, 32),
        {"bias": ((1, 2, 1, 150), "float32"), "segments": "packed",
         "window": CAUSAL, "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2, claimed=True),
    ),
    "of keys, beside a mask": (
        (2, 540, 130, 2, 1, 32, 32),
        {"bias": ((2, 1, 1, 130), "float32"), "near": (2, 2, 540, 130),
         "empty_rows": "mean"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "a number": (
        (2, 70, 70, 2, 2, 32, 32), {"bias": ((2, 1, 1, 1), "float32"), "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "of queries and a sink": (
        (2, 130, 140, 4, 2, 32, 32),
        {"bias": ((2, 4, 130, 1), "float32"), "sinks": (4,), "window": (20, 0)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "slopes of groups": (
        (2, 200, 260, 4, 2, 32, 32),
        {"alibi": (4,), "window": CAUSAL, "offset": (40, 60)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "slopes, wide": (
        (1, 130, 140, 4, 2, 192, 128), {"alibi": (4,), "sinks": (4,)},
        Tiles(32, 2, 2, 2), BackwardTiles(64, 32, 2, 2, 2, divided=True, v_stages=1),
    ),
}  # fmt: skip


def errors_within_limits(
    got: dict[str, Any], want: dict[str, Any], given: dict[str, Any], up: Any
) -> None:
    """Every cotangent against float64; that of slopes is at least as good as XLA's.

    Args:
        got: The result and cotangents.
        want: The same in float64.
        given: Operands and parameters.
        up: The cotangent of the result.
    """
    for which, x in got.items():
        limit, exact = 3 * LIMITS["bfloat16"], np.asarray(want[which])
        if which == "alibi":  # a sum whose terms cancel
            arrays = {n: x for n, x in given.items() if hasattr(x, "shape")}
            params = {n: x for n, x in given.items() if n not in arrays}
            arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
            limit = error(slopes_as_written(arrays, params, jnp.asarray(up)), exact)
        if np.linalg.norm(exact) < 1e-9:  # the only weight is 1, or a row moves none
            assert np.linalg.norm(x) <= limit * np.linalg.norm(up), which
            continue
        assert error(x, exact) <= limit, which


def simulated(name: str, fused: bool, tables: bool = False) -> None:
    shape, case, tiles, back = {**CASES, **TABLES, **COLUMNS, **PASSING}[name]
    back = dataclasses.replace(back, fused=fused, tables=tables)
    q, k, v, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = drawn(case, shape)
    want = wanted(q, k, v, up, given)
    with simulator.simulated():
        out, residuals = forward_kernel.forward(
            q, k, v, residuals=True, config=tiles, **given
        )
        got = backward_kernel.backward(
            q, k, v, out=out, residuals=residuals, cotangent=up, config=back, **given
        )
    by_xla = "bias" in given and 1 not in given["bias"].shape[2:] and not tables
    assert got.keys() == want.keys() - {"out"} - ({"bias"} if by_xla else set())
    assert error(out, np.asarray(want["out"])) <= LIMITS["bfloat16"]
    errors_within_limits(got, want, {"q": q, "k": k, "v": v, **given}, up)


@pytest.mark.parametrize("name", first(5, CASES))
def test_its_code_run_by_threads(name: str) -> None:
    """Numbers, memory that is handed on, and barriers, with no GPU."""
    simulated(name, fused=False)


@pytest.mark.parametrize("name", first(1, ["lowest", "segments", "pair"]))
def test_one_kernel_for_all_gradients_run_by_threads(name: str) -> None:
    """Rows past the last key have infinite weights for rows of low scores."""
    simulated(name, fused=True)


@pytest.mark.parametrize("name", first(3, TABLES))
def test_cotangents_of_biases_run_by_threads(name: str) -> None:
    """Sums over all that share a bias, each of them once."""
    simulated(name, fused=False, tables=True)


@pytest.mark.parametrize("name", first(4, COLUMNS))
def test_cotangents_of_keys_and_slopes_run_by_threads(name: str) -> None:
    """Sums over all queries that meet a key, of each head apart."""
    simulated(name, fused=False)


def test_what_is_hidden_may_be_anything() -> None:
    """NaN in keys that a mask or segments hide does not reach the result."""
    shape = (1, 130, 140, 2, 2, 32, 32)
    q, k, v, _ = (np.array(x) for x in operands(shape, "bfloat16"))
    k[:, 70:] = np.nan
    seen = np.arange(140) < 70
    ids = np.where(seen, 0, 1).astype(np.int32)[None]
    hiders = {
        "table": {"mask": np.broadcast_to(seen, (1, 2, 130, 140))},
        "keys": {
            "mask": seen[None, None, None],
            "bias": np.zeros((1, 1, 1, 140), np.float32),
        },
        "segments": {"q_segments": np.zeros((1, 130), np.int32), "kv_segments": ids},
    }
    want = wanted(q, k[:, :70], v[:, :70], q, {})["out"]
    tiles = Tiles(64, 2, 2, 2, turns=False)
    for name, given in hiders.items():
        with simulator.simulated():
            got = forward_kernel.forward(q, k, v, config=tiles, **given)
        assert error(got, np.asarray(want)) <= LIMITS["bfloat16"], name


PASSING: dict[str, Case] = {  # rows without keys of which scores have a gradient
    "of positions": (
        (3, 130, 150, 4, 2, 32, 32),
        {"kv_lengths": (0, 70, 150), "window": CAUSAL, "shift": 10},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of a mask, biases of pairs": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "bias": ((1, 4, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "of a mask, biases of keys": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (2, 4, 130, 140), "hidden": 7, "bias": ((2, 1, 1, 140), "float32"),
         "alibi": (4,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of rows that a mask hides": (
        (2, 130, 140, 2, 2, 32, 32),
        {"mask": (2, 1, 130, 1), "bias": ((1, 2, 130, 1), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of a soft cap": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "beside sinks": (
        (1, 130, 140, 2, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of all in one": (
        (3, 130, 150, 4, 2, 32, 32), {"kv_lengths": (0, 70, 150)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, fused=True),
    ),
}  # fmt: skip
for _shape, _case, *_ in PASSING.values():
    _case["empty_rows"] = "mean_passing"


@pytest.mark.parametrize("name", first(3, PASSING))
def test_rows_without_keys_pass_gradients(name: str) -> None:
    back = PASSING[name][3]
    simulated(name, back.fused, back.tables)


HIDDEN: dict[str, Case] = {  # some keys are seen by no query
    "a table of masks and of biases": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 130, 140), "keys": 70, "hidden": 7,
         "bias": ((1, 2, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "pairs and a mask of keys": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 1, 140), "keys": 70, "bias": ((1, 2, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "a mask of keys": (
        (2, 130, 140, 2, 1, 32, 32),
        {"mask": (2, 1, 1, 140), "keys": 70, "bias": ((1, 1, 1, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "a mask of keys, wide": (
        (1, 130, 140, 2, 1, 32, 32), {"mask": (1, 1, 1, 140), "keys": 70},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "a mask of keys, slopes": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 1, 140), "keys": 70, "bias": ((1, 1, 1, 140), "float32"),
         "alibi": (2,), "window": CAUSAL, "shift": -20},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "lengths, in one": (
        (2, 130, 150, 2, 1, 32, 32),
        {"kv_lengths": (0, 70), "empty_rows": "mean_passing"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, fused=True),
    ),
    "lengths": (
        (2, 130, 150, 2, 1, 32, 32), {"kv_lengths": (0, 70)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "wide": (
        (1, 70, 150, 2, 1, 32, 32),
        {"kv_lengths": (70,), "window": (40, 0), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "segments": (
        (1, 130, 260, 2, 1, 32, 32), {"segments": "apart", "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first(3, HIDDEN))
def test_gradients_of_what_is_hidden_are_finite(name: str) -> None:
    """Those that are by the formula, whatever hidden keys and other rows hold."""
    with simulator.simulated():
        check_hidden(name, forward_kernel.forward, backward_kernel.backward)


def check_hidden(name: str, forward: Any, backward: Any) -> None:
    shape, case, tiles, back = HIDDEN[name]
    *arrays, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = drawn(case, shape)
    hidden = ~seen_at_all(shape, given)
    for which, bad in (("k", np.nan), ("v", np.nan), ("v", np.inf), ("up", np.nan)):
        named = {**dict(zip("qkv", arrays, strict=True)), "up": up.copy()}
        if which == "up":
            named["up"][:, 3] = bad
        else:
            made = np.where(hidden[..., None, None], bad, named[which])
            named[which] = made.astype(up.dtype)
        want = wanted(**named, given=given)
        q, k, v, cotangent = named.values()
        out, residuals = forward(q=q, k=k, v=v, residuals=True, config=tiles, **given)
        got = backward(
            q=q, k=k, v=v, out=out, residuals=residuals, cotangent=cotangent,
            config=back, **given,
        )  # fmt: skip
        for part, x in {"out": out, **got}.items():
            exact, x = np.asarray(want[part]), np.asarray(x, np.float64)
            finite = np.isfinite(exact)
            assert np.isfinite(x[finite]).all(), (which, bad, part)
            exact, x = exact[finite], x[finite]
            limit = 4 * LIMITS["bfloat16"] * max(np.linalg.norm(exact), 1.0)
            assert np.linalg.norm(x - exact) <= limit, (which, bad, part)


def seen_at_all(shape: tuple[int, ...], given: dict[str, Any]) -> np.ndarray:
    """Which keys some query sees, bool [b, s]."""
    names = ("mask", "q_segments", "kv_segments", "kv_lengths", "window", "shift")
    part = {n: given[n] for n in names if n in given}
    seen = visible(shape[1], shape[2], **part)
    return np.broadcast_to(np.asarray(seen).any((1, 2)), (shape[0], shape[2]))


# ---------------------------------------------------------------- on a Hopper GPU
WIDE: dict[str, Case] = {
    "pairs of a fold": (
        (64, 384, 384, 4, 4, 32, 32),
        {"bias": ((1, 4, 384, 384), "bfloat16"), "mask": (64, 1, 1, 384)},
        None, BackwardTiles(),
    ),
    "pairs, float32": (
        (8, 333, 333, 4, 4, 32, 32),
        {"bias": ((1, 4, 333, 333), "float32"), "mask": (8, 1, 1, 333)},
        None, BackwardTiles(),
    ),
    "wide tables": (
        (2, 300, 500, 4, 2, 128, 128),
        {"bias": ((2, 4, 300, 500), "float32"), "mask": (2, 1, 300, 500)},
        None, BackwardTiles(),
    ),
    "three warpgroups": (
        (2, 300, 500, 4, 2, 64, 64), {"mask": (2, 1, 300, 500), "window": (90, 90)},
        Tiles(64, 2, 3), BackwardTiles(64, 64, 2, 3),
    ),
    "documents by a mask": (
        (2, 1500, 1500, 4, 2, 128, 128), {"near": (2, 4, 1500, 1500)},
        None, BackwardTiles(),
    ),
    "packed": (
        (2, 2500, 2500, 4, 2, 128, 128), {"segments": "packed", "window": CAUSAL},
        None, BackwardTiles(),
    ),
    "slopes": (
        (2, 700, 700, 4, 4, 64, 64), {"alibi": (4,), "window": CAUSAL},
        None, BackwardTiles(64, 128, 2),
    ),
    "slopes, far": (
        (1, 300, 4000, 4, 4, 128, 128), {"alibi": (4,), "shift": 3700},
        None, BackwardTiles(),
    ),
    "sinks": (
        (2, 700, 700, 8, 2, 64, 64), {"sinks": (8,), "window": (127, 0)},
        None, BackwardTiles(64, 128, 3),
    ),
    "soft cap": (
        (2, 300, 300, 2, 2, 64, 64),
        {"bias": ((2, 1, 300, 300), "bfloat16"), "softcap": 4.0, "sinks": (2,)},
        None, BackwardTiles(),
    ),
    "width of 256, segments and slopes": (
        (2, 700, 700, 4, 2, 256, 256),
        {"segments": "packed", "alibi": (4,), "window": CAUSAL},
        None, BackwardTiles(64, 32, divided=True),
    ),
    "width of 256, bias and mask": (
        (2, 300, 300, 4, 2, 256, 256),
        {"bias": ((2, 1, 300, 300), "float32"), "mask": (1, 4, 300, 300),
         "softcap": 5.0, "empty_rows": "zero"},
        None, BackwardTiles(32, 32, divided=True, v_stages=1),
    ),
    "width of 192, values of 128": (
        (2, 500, 400, 4, 4, 192, 128),
        {"bias": ((1, 4, 500, 400), "bfloat16"), "sinks": (4,)},
        None, BackwardTiles(64, 64, 2, divided=True),
    ),
    "values of 256": (
        (1, 300, 300, 2, 2, 256, 256), {"segments": "packed", "alibi": (2,)},
        None, BackwardTiles(),
    ),
    "one row": (
        (3, 1, 200, 2, 2, 64, 64), {"bias": ((3, 2, 1, 200), "float32")},
        None, BackwardTiles(),
    ),
    "one key": (
        (3, 200, 1, 2, 2, 64, 64), {"mask": (3, 2, 200, 1), "empty_rows": "zero"},
        None, BackwardTiles(),
    ),
}  # fmt: skip


LARGE_TABLES: dict[str, Case] = {
    "for each, 128 wide": (
        (2, 700, 600, 4, 2, 128, 128),
        {"bias": ((2, 4, 700, 600), "bfloat16"), "softcap": 5.0},
        None, BackwardTiles(),
    ),
    "for a head, 128 wide": (
        (3, 700, 700, 4, 4, 128, 128),
        {"bias": ((1, 4, 700, 700), "float32"), "window": CAUSAL},
        None, BackwardTiles(),
    ),
    "for a head, pairs": (
        (64, 384, 384, 4, 4, 32, 32),
        {"bias": ((1, 4, 384, 384), "bfloat16"), "mask": (64, 1, 1, 384)},
        None, BackwardTiles(64, 128),
    ),
    "for all, 192 wide": (
        (2, 300, 300, 2, 2, 192, 128), {"bias": ((1, 1, 300, 300), "bfloat16")},
        None, BackwardTiles(64, 64, divided=True),
    ),
}  # fmt: skip


def slopes_as_written(arrays: Any, params: Any, up: Any) -> Any:
    """Returns the cotangent of slopes of the op as usually written, in 16 bits."""
    run = lambda slopes: usual(**{**arrays, "alibi": slopes}, **params)
    out, back = jax.vjp(run, arrays["alibi"])
    return back(up.astype(out.dtype))[0]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "name", [*CASES, *WIDE, *TABLES, *LARGE_TABLES, *COLUMNS, *PASSING]
)
def test_numbers_against_float64(name: str) -> None:
    tables = {**TABLES, **LARGE_TABLES}
    every = {**CASES, **WIDE, **COLUMNS, **PASSING, **tables}
    shape, case, tiles, back = every[name]
    back = dataclasses.replace(back, tables=back.tables or name in tables)
    arrays = dict(zip(("q", "k", "v"), operands(shape, "bfloat16"), strict=False))
    up, given = operands(shape, "bfloat16")[3], drawn(case, shape)
    others = {n: jnp.asarray(x) for n, x in given.items() if isinstance(x, np.ndarray)}
    params = {n: x for n, x in given.items() if n not in others}
    its = spec_of(registry().op("attention"), {**arrays, **others}, params)
    assert hopper.supports(its).ok
    tiles = tiles or hopper.default(its, H200)

    @jax.jit
    def run(arrays: Any) -> Any:
        out, kept = hopper.forward(**arrays, **params, residuals=True, config=tiles)
        grads = hopper.backward(
            **arrays, **params, out=out, residuals=kept, cotangent=up, config=back
        )
        return {"out": out, **grads}

    both = {**arrays, **others}
    got, again = run(both), run(both)
    want = wanted(*(np.asarray(x) for x in arrays.values()), np.asarray(up), given)
    assert error(got["out"], np.asarray(want["out"])) <= LIMITS["bfloat16"]
    errors_within_limits(got, want, {**both, **params}, up)
    by_xla = "bias" in others and 1 not in others["bias"].shape[2:]
    others = {"bias"} if by_xla and not back.tables else set()
    others |= {"q"} if back.fused else set()  # added up in no fixed order
    for which in want.keys() - others:
        bits.assert_same(got[which], again[which])  # a race would show as a change


@pytest.mark.gpu
@needs_hopper
def test_what_is_hidden_may_be_anything_there_too() -> None:
    q, k, v, _ = operands((2, 300, 300, 2, 2, 64, 64), "bfloat16")
    seen = np.arange(300) < 170
    bad = k.at[:, 170:].set(jnp.nan)
    run = jax.jit(functools.partial(hopper.forward, scale=0.125))
    want = exact(q, k[:, :170], v[:, :170], scale=0.125)
    for mask in (seen[None, None, None], np.broadcast_to(seen, (1, 2, 300, 300))):
        got = run(q=q, k=bad, v=v, mask=jnp.asarray(mask))
        assert error(got, want) <= LIMITS["bfloat16"]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", HIDDEN)
def test_gradients_of_what_is_hidden_are_finite_there_too(name: str) -> None:
    def as_arrays(call: Any, given: dict[str, Any]) -> Any:
        arrays = {n: jnp.asarray(x) for n, x in given.items() if hasattr(x, "shape")}
        params = {n: x for n, x in given.items() if n not in arrays}
        return jax.jit(lambda x: call(**x, **params))(arrays)

    check_hidden(
        name,
        lambda **given: as_arrays(hopper.forward, given),
        lambda residuals, **given: as_arrays(
            lambda lse, **x: hopper.backward(residuals=(lse,), **x),
            {"lse": residuals[0], **given},
        ),
    )
