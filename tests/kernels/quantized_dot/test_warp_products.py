"""Products by tensor cores of warps: which numbers a thread gives them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.quantized_dot.few_rows import kernel, threads, warp_products
from rewriter.kernels.quantized_dot.few_rows.config import CHUNK, Tiles
from rewriter.kernels.quantized_dot.few_rows.kernel import alternating
from rewriter.kernels.quantized_dot.few_rows.registers import Steps

BASE = 5 << 10
"""The address of a chunk, as tiles are aligned."""

LANES = np.arange(32, dtype=np.int64)
WHOLE = {
    "and": np.bitwise_and, "xor": np.bitwise_xor, "shl": np.left_shift,
    "shr": np.right_shift, "add": np.add, "mul": np.multiply,
    "mad": lambda x, y, z: x * y + z,
}  # fmt: skip


def emit(text: str, given: Any, result: Any = None, effects: bool = False) -> Any:
    """Executes instructions on whole numbers, for all lanes of the second warp."""
    del result, effects
    named: dict[str, Any] = {f"${i + 1}": x for i, x in enumerate(given)}
    named["%tid.x"] = LANES + 32
    value = lambda x: named[x] if x in named else int(x, 0)
    for line in text.strip("{} ").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *words = (x.strip() for x in rest.split(","))
        words = [value(x) for x in words]
        verb = name.split(".")[0]
        if verb == "mov":
            named[target] = words[0]
        elif verb == "bfe":
            named[target] = words[0] >> words[1] & (1 << words[2]) - 1
        elif verb == "prmt":
            named[target] = permuted(*words)
        else:
            named[target] = WHOLE[verb](*words)
    return named["$0"]


def permuted(low: np.ndarray, high: np.ndarray, order: int) -> np.ndarray:
    both = np.stack([low, high], -1).view(np.uint8)
    picked = both[..., [order >> 4 * i & 7 for i in range(4)]]
    return np.ascontiguousarray(picked).view(np.uint32)[..., 0]


def swizzled(rows: np.ndarray) -> np.ndarray:
    """The bytes of a chunk [rows, CHUNK], as it lies in shared memory."""
    pieces = rows.view(np.uint8).reshape(len(rows), 8, 16)
    order = np.arange(8) ^ (np.arange(len(rows)) % 8)[:, None]
    return np.take_along_axis(pieces, order[..., None], 1).reshape(-1)


def lanes_of(monkeypatch: pytest.MonkeyPatch, memory: np.ndarray) -> None:
    """Lets the kernel's own functions read this memory, for 32 lanes at once."""
    places = lambda base: np.asarray(base) - BASE

    def words(base: Any, offset: int, count: int) -> list[np.ndarray]:
        read = [places(base) + offset + i for i in range(4 * count)]
        return list(np.stack([memory[x] for x in read], -1).view(np.uint32).T.copy())

    def matrices(base: Any, offset: int) -> list[np.ndarray]:
        starts = (places(base) + offset).reshape(4, 8)
        read = starts[:, LANES // 4] + 4 * (LANES % 4)
        return [memory[x[:, None] + np.arange(4)].view(np.uint32)[:, 0] for x in read]

    for module in (warp_products, threads):
        monkeypatch.setattr(module, "emit", emit)
    monkeypatch.setattr(warp_products, "address", lambda _: BASE)
    monkeypatch.setattr(warp_products, "_words", words)
    monkeypatch.setattr(warp_products, "_four_matrices", matrices)


def operand(columns: np.ndarray) -> np.ndarray:
    """Two registers [product, 2, lane] of 8 rows [8, CHUNK], as PTX defines them."""
    row, t = LANES // 4, LANES % 4
    starts = 8 * np.arange(8)[:, None] + 2 * t
    pairs = np.stack([columns[row, starts], columns[row, starts + 1]], -1)
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0].reshape(4, 2, 32)


@pytest.mark.parametrize("tiles", [1, 4])
def test_rows_in_order(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(0, 1 << 16, (8 * tiles, CHUNK), np.uint16)
    lanes_of(monkeypatch, swizzled(rows))
    made = warp_products.Rows().of(None, tiles)
    for tile, own in enumerate(made):
        want = operand(rows[8 * tile : 8 * tile + 8])
        np.testing.assert_array_equal(np.array(own), want)


@pytest.mark.parametrize("places", ["", "10", "04152637", "75316420"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_words(bits: int, places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet numbers as rows do that are put into order before."""
    if len(places) * bits > 32:
        pytest.skip("a word has four numbers of eight bits")
    use = kernel.Use(
        Steps((), (), "float16"), (), f"int{bits}", "float32", Tiles(by_warps=True),
        alternating=True, places=tuple(map(int, places)),
    )  # fmt: skip
    each = 32 // bits
    rows = np.random.default_rng(0).integers(0, 1 << 16, (16, CHUNK), np.uint16)
    lanes_of(monkeypatch, swizzled(rows))
    made = warp_products.RowsOfWords(use, bits).of(None, 2)
    number_at = np.argsort([use.place_of(i) for i in range(each)])
    in_words = rows.reshape(16, -1, each)[..., number_at].reshape(rows.shape)
    want = np.asarray(alternating(jnp.asarray(in_words), each))
    for tile, own in enumerate(made):
        expected = operand(want[8 * tile : 8 * tile + 8])
        np.testing.assert_array_equal(np.array(own), expected)
