"""Attention on Hopper with operands beside q, k and v: segments, slopes, tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import (
    backward_config,
    block_masks,
    config,
    terms,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.block_masks import Masks
from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.extra_operands import extra_in, extra_of
from rewriter.kernels.attention.hopper.transposed_terms import transposed
from rewriter.kernels.attention.reference import visible
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import (
    CAUSAL,
)
from tests.slow import first

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
    extra = extra_in(spec(256, bias=TABLE, mask=MASK))
    verdict = config.fits_widths(Tiles(64, 2, 2), 256, 240, extra)
    assert "KiB of shared memory of 227 KiB" in verdict.reasons[0].text


def test_tables_take_shared_memory() -> None:
    extra = extra_in(spec(128, bias=TABLE))
    assert config.fits_widths(Tiles(128), 128, 128).ok
    assert not config.fits_widths(Tiles(128), 128, 128, extra).ok
    assert config.fits_widths(Tiles(64), 128, 128, extra).ok
    verdict = config.fits_widths(Tiles(80), 64, 64, extra)
    assert "80 is not a multiple of 32" in verdict.reasons[0].text
    fits = backward_config.fits_backward_widths
    assert fits(BackwardTiles(64, 64), 128, 128, extra).ok
    assert backward_config.table_stages(BackwardTiles(), 64, 64, extra) == 2
    wide = BackwardTiles(64, 128, 3)
    assert fits(wide, 64, 64).ok
    assert not fits(wide, 64, 64, extra).ok


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
    "positions": {
        "kv_positions": ((2, 200), "int32"), "first_position": ((1, 130), "int32"),
        "last_position": ((2, 130), "int32"),
    },
}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_memory_is_counted_as_it_is_taken(name: str, turned: bool) -> None:
    given = {n: jnp.zeros(*x) for n, x in FORMS[name].items()}
    found, arrays = terms.terms_of(130, 200, **given)
    extra = extra_of(given)
    if turned:
        (found, arrays), extra = transposed(found, arrays), extra.transposed
    scratch = found.scratch(2, 3, 64)
    taken = sum(np.prod(x.shape) * x.dtype.itemsize for x in scratch.values())
    assert taken == extra.nbytes(2, 192, 64)
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
            table = np.asarray(block_masks.table(2, t, s, *cut, Masks(segments=(q, k))))
            for window, shift in (((None, None), 0), (CAUSAL, 40), ((30, 5), -9)):
                given = {"window": window, "shift": shift}
                seen = visible(t, s, q_segments=q, kv_segments=k, **given)
                mask = Mask(t, s, *window, shift, more=True)
                check(mask, seen, seen, table, cut)


def test_blocks_that_positions_leave_against_a_table() -> None:
    """Both ways: tiles of queries, and tiles of keys."""
    random = np.random.default_rng(0)
    t, s, cut = 300, 260, (64, 32)
    ordered = lambda n: np.sort(random.integers(0, 300, (2, n)), 1).astype(np.int32)
    restart = lambda n: (np.arange(2 * n).reshape(2, n) % 90).astype(np.int32)
    for draw in (ordered, restart):
        keys, at = draw(s), draw(t)
        for ends in ((at - 40, at), (None, at), (at, None), (at, at), (at, at - 1)):
            names = dict(zip(("first_position", "last_position"), ends, strict=True))
            seen = np.asarray(visible(t, s, kv_positions=keys, **names))
            masks = Masks(places=(keys, *ends))
            table = np.asarray(block_masks.table(2, t, s, *cut, masks))
            check(Mask(t, s, more=True), seen, seen, table, cut)
            seen = seen.swapaxes(2, 3)
            table = np.asarray(block_masks.table(2, s, t, *cut, masks.transposed))
            check(Mask(s, t, more=True), seen, seen, table, cut)


@pytest.mark.parametrize("form", [(2, 3, 150, 300), (1, 3, 1, 300), (2, 1, 150, 1)])
def test_blocks_that_masks_leave_against_a_table(form: tuple[int, ...]) -> None:
    n, rows, keys = np.ogrid[: form[1], : form[2], : form[3]]
    near = np.broadcast_to(np.abs(keys - rows - 20 * n) < 90, form)
    mask, cut = Mask(150, 300, more=True), (64, 32)
    for seen in (near, np.random.default_rng(0).random(form) < 0.9):
        wide = np.broadcast_to(seen, (*form[:2], 150, 300))
        table = np.asarray(block_masks.table(form[0], 150, 300, *cut, Masks(seen)))
        check(mask, wide, wide, table, cut)
        of_all = np.asarray(
            block_masks.table(form[0], 150, 300, *cut, Masks(seen), group=form[1])
        )
        check(mask, wide.any(1)[:, None], wide.all(1)[:, None], of_all, cut)


def test_masks_of_few_blocks_are_read_whole() -> None:
    assert (
        block_masks.table(1, 150, 200, 64, 32, Masks(np.ones((1, 1, 1, 200), bool)))
        is None
    )
    assert (
        block_masks.table(1, 150, 300, 64, 32, Masks(np.ones((1, 1, 1, 300), bool)))
        is not None
    )


def test_packed_segments_read_their_own_blocks() -> None:
    ids = np.repeat(np.arange(4, dtype=np.int32), 1024)[None]
    table = np.asarray(
        block_masks.table(1, 4096, 4096, 128, 128, Masks(segments=(ids, ids)))
    )
    np.testing.assert_array_equal(table[0, 0, 9], [8, 8, 16, 16])
    later = np.roll(ids, -64, 1)
    table = np.asarray(
        block_masks.table(1, 4096, 4096, 128, 128, Masks(segments=(later, ids)))
    )
    np.testing.assert_array_equal(table[0, 0, 7], [0, 16, 16, 16])
    causal = np.tril(np.ones((1, 1, 1024, 1024), bool))
    table = np.asarray(block_masks.table(1, 1024, 1024, 128, 64, Masks(causal)))
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
