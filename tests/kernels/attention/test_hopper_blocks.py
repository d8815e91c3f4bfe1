"""Attention on Hopper: which blocks of keys and which tiles are computed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of, only_first
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.reference import visible
from tests.kernels.attention.test_hopper import CAUSAL, NONE


def masks() -> list[tuple[Mask, int, int | None]]:
    found = []
    sizes = [(128, 128), (1, 300), (300, 1), (257, 130), (100, 333)]
    windows = [
        NONE,
        CAUSAL,
        (0, 0),
        (50, 0),
        (70, 33),
        (None, -40),
        (5, -9),
        (40, None),
    ]
    for (t, s), window, shift, mean in itertools.product(
        sizes, windows, (0, 60, -200), (False, True)
    ):
        found.append((Mask(t, s, *window, shift, mean=mean), 0, None))
        found.append(
            (Mask(t, s, *window, shift, True, True, mean), 17 - s // 2, s // 3)
        )
        found.append((Mask(t, s, *window, shift, True, True, mean), 3, 0))
    return found


@pytest.mark.parametrize(("rows", "keys"), [(128, 64), (192, 80), (64, 256)])
def test_blocks_against_a_table_of_what_is_seen(rows: int, keys: int) -> None:
    """Whole blocks are seen whole; what is left out is seen by no row."""
    for mask, offset, length in masks():
        seen = visible(
            mask.t, mask.s, window=(mask.left, mask.right), shift=mask.shift,
            offset=np.array([offset]),
            kv_lengths=None if length is None else np.array([length]),
        )  # fmt: skip
        table = np.ones((mask.t, mask.s), bool) if seen is None else np.asarray(seen)
        table = np.broadcast_to(table, (1, 1, mask.t, mask.s))[0, 0]
        empty = ~table.any(1)
        assert mask.may_be_empty or not empty.any()
        if mask.averages:
            table = table | empty[:, None]  # they read all keys
        for first in range(0, mask.t, rows):
            r = blocks_of(mask, first, rows, keys, offset + mask.shift, length)
            tile = table[first : first + rows]
            assert 0 <= r.start <= r.whole <= r.part <= r.end <= -(-mask.s // keys)
            assert r.count >= 1
            assert not tile[:, : r.start * keys].any()
            assert not tile[:, r.end * keys :].any()
            inside = tile[:, r.whole * keys : r.part * keys]
            assert inside.all()
            assert inside.shape[1] == (r.part - r.whole) * keys


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_with_a_prefix_against_a_table(turned: bool) -> None:
    """The same of keys before a number, which all queries see, both ways round."""
    given = itertools.product(
        [(257, 130), (100, 333), (128, 128)], (0, 5, -40), (0, 60, -90), (None, 70),
        (0, 1, 64, 100, 500),
    )  # fmt: skip
    for (t, s), right, shift, length, prefix in given:
        seen = visible(
            t, s, window=(None, right), shift=shift, prefix=np.array([prefix]),
            kv_lengths=None if length is None else np.array([length]),
        )  # fmt: skip
        table = np.broadcast_to(np.asarray(seen), (1, 1, t, s))[0, 0]
        if turned:  # rows past a length are cut elsewhere
            table = np.asarray(
                visible(t, s, window=(None, right), shift=shift,
                        prefix=np.array([prefix]))
            )[0, 0].T  # fmt: skip
            mask = Mask(s, t, right, None, -shift, more=True, prefixes=True)
        else:
            mask = Mask(
                t, s, None, right, shift, length is not None, more=True, prefixes=True
            )
        for first in range(0, mask.t, 128):
            named = {"early": prefix} if turned else {"prefix": prefix}
            at = None if turned else length
            r = blocks_of(mask, first, 128, 64, mask.shift, at, **named)
            tile = table[first : first + 128]
            assert 0 <= r.start <= r.whole <= r.part <= r.end <= -(-mask.s // 64)
            assert r.count >= 1
            assert not tile[:, : r.start * 64].any()
            assert not tile[:, r.end * 64 :].any()
            inside = tile[:, r.whole * 64 : r.part * 64]
            assert inside.all()
            assert inside.shape[1] == (r.part - r.whole) * 64


def test_blocks_of_a_kernel_are_those_of_plain_integers() -> None:
    """In a kernel the same arithmetic runs on scalars that are not known."""
    for mask, offset, length in masks()[::7]:

        def traced(
            first: Any, offset: Any, length: Any, mask: Mask = mask
        ) -> tuple[Any, ...]:
            return tuple(
                jnp.asarray(x)
                for x in dataclasses.astuple(
                    blocks_of(mask, first, 128, 64, offset, length)
                )
            )

        for first in range(0, mask.t, 128):
            at = offset + mask.shift
            want = dataclasses.astuple(blocks_of(mask, first, 128, 64, at, length))
            given = (jnp.int32(first), jnp.int32(at))
            given += (None if length is None else jnp.int32(length),)
            assert tuple(map(int, traced(*given))) == want


def test_blocks_that_are_seen_whole_need_no_comparisons() -> None:
    """Of 32 blocks of a causal tile's keys only the last is compared."""
    r = blocks_of(Mask(4096, 4096, None, 0), 4096 - 128, 128, 128)
    assert (r.start, r.whole, r.part, r.end) == (0, 0, 31, 32)
    r = blocks_of(Mask(4096, 4096, 255, 0), 2048, 128, 128)
    assert (r.start, r.whole, r.part, r.end) == (14, 15, 16, 17)


@pytest.mark.parametrize("right", [None, 0])
def test_hidden_tiles_read_one_block(right: int | None) -> None:
    for first in range(0, 1024, 128):
        r = blocks_of(Mask(1024, 1024, right, None), first, 128, 64)
        assert only_first(r, False) == r
        alone = only_first(r, True)
        assert (alone.start, alone.count, alone.end - alone.part) == (r.start, 1, 1)
        # In a kernel the comparison is a scalar that is not known.
        traced = dataclasses.astuple(only_first(r, jnp.bool_(True)))
        assert tuple(map(int, traced)) == dataclasses.astuple(alone)


def test_every_tile_is_taken_once_and_work_is_even() -> None:
    for pairs, rows, programs, nbytes in [(64, 32, 132, 1), (7, 5, 4, 9 << 20)]:
        work = tuple(range(1, rows + 1))
        order = Order(pairs, nbytes, programs, work)
        places = [order.place(i) for i in range(order.tiles)]
        assert len(set(places)) == rows * pairs
        assert [r for r, _ in places[: order.section]] == [rows - 1] * order.section
        table = order.table
        assert table is not None
        assert table.shape[0] == order.blocks
        taken = [list(row[1 : 1 + row[0]]) for row in table]
        assert sorted(itertools.chain(*taken)) == list(range(order.tiles))
        ends = [sum(work[places[i][0]] + 1 for i in row) for row in taken]
        assert max(ends) - min(ends) <= rows + 1
        traced = jax.jit(order.place)(jnp.int32(order.tiles - 1))
        assert tuple(map(int, traced)) == places[-1]


def test_tiles_alike_are_taken_in_turns() -> None:
    order = Order(3, 1, 4, (2, 2, 2))
    assert order.table is None
    assert sum(int(order.count(p)) for p in range(order.blocks)) == 9
