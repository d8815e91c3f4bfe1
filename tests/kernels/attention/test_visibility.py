"""Each place that works out which keys a query sees, against a table of pairs."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper_decode.config import Split
from rewriter.kernels.attention.hopper_decode.problem import Pages, Problem
from rewriter.kernels.attention.reference import visible
from rewriter.kernels.attention.ring.turns import turns
from rewriter.kernels.attention.tpu import schedule
from rewriter.kernels.attention.tpu_pages import schedule as paged
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.attention.xla import problem, tile, tiles
from rewriter.kernels.attention.xla.config import Blocks


@dataclass(frozen=True)
class Case:
    """What a query sees: numbers of one sequence."""

    t: int
    s: int
    left: int | None
    right: int | None
    shift: int
    offset: int | None = None
    length: int | None = None
    prefix: int | None = None
    segments: bool = False

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    @property
    def start(self) -> int:
        return self.shift + (self.offset or 0)

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Segments of queries and keys."""
        return np.arange(self.t) * 3 // self.t, np.arange(self.s) * 3 // self.s

    def sees(self, i: int, j: int) -> bool:
        """The definition."""
        away = j - (i + self.start)
        inside = self.left is None or away >= -self.left
        inside = inside and (self.right is None or away <= self.right)
        inside = inside or (self.prefix is not None and j < self.prefix)
        q, k = self.sides
        inside = inside and (not self.segments or q[i] == k[j])
        return bool(inside and (self.length is None or j < self.length))

    def table(self) -> np.ndarray:
        pairs = [[self.sees(i, j) for j in range(self.s)] for i in range(self.t)]
        return np.array(pairs, bool).reshape(self.t, self.s)

    def visibility(self, **more: Any) -> Visibility:
        numbers = (self.offset, self.length, self.prefix)
        return Visibility(self.t, self.s, *self.window, self.shift, *numbers, **more)

    def arrays(self) -> dict[str, np.ndarray]:
        """The op's operands."""
        given = {
            "offset": self.offset, "kv_lengths": self.length, "prefix": self.prefix
        }  # fmt: skip
        found = {k: np.array([v], np.int32) for k, v in given.items() if v is not None}
        if self.segments:
            q, k = self.sides
            found |= {"q_segments": q[None], "kv_segments": k[None]}
        return found


FEW = ((7, 12), (12, 7), (1, 9))
"""Sizes where each new one is compiled."""


def cases(
    count: int, *names: str, seed: int = 0, sizes: tuple[tuple[int, int], ...] = ()
) -> list[Case]:
    """Random cases; the named numbers are there in some of them."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int, often: float = 0.6) -> int | None:
        return int(rng.integers(low, high)) if rng.random() < often else None

    found = []
    for _ in range(count):
        some_size = sizes[int(rng.integers(len(sizes)))] if sizes else None
        t, s = some_size or (int(x) for x in rng.integers(1, 20, 2))
        far = t + s + 2
        left, right, shift = some(-6, far), some(-6, far), some(-far, far, 0.5) or 0
        numbers = {
            "offset": some(-far, far), "length": some(0, s + 4),
            "prefix": some(0, s + 3), "segments": rng.random() < 0.3,
        }  # fmt: skip
        if left is None and right is None:
            numbers["prefix"] = None
        given = {k: v for k, v in numbers.items() if k in names}
        found.append(Case(t, s, left, right, shift, **given))
    return found


ALL = ("offset", "length", "prefix", "segments")


def test_pairs_one_by_one() -> None:
    for case in cases(300, *ALL):
        queries, keys = np.arange(case.t)[:, None], np.arange(case.s)
        q, k = case.sides
        segments = (q[:, None], k) if case.segments else None
        keep = case.visibility(segments=segments).keep(queries, keys)
        keep = np.broadcast_to(True if keep is None else keep, (case.t, case.s))
        np.testing.assert_array_equal(keep, case.table(), str(case))


def test_edges_of_a_window() -> None:
    for case in cases(100, "offset"):
        view, table = case.visibility(), case.table()
        for i, j in np.ndindex(table.shape):
            first = view.first(i + case.start) if case.left is not None else 0
            last = view.last(i + case.start) if case.right is not None else case.s
            assert table[i, j] == (first <= j <= last)


def test_windows_without_keys() -> None:
    for case in cases(300):
        empty = not case.table().any(1).all()
        assert case.visibility().may_be_empty == empty, case
        mask = Mask(case.t, case.s, *case.window, case.shift)
        assert mask.may_be_empty == empty, case


def test_a_window_beyond_int32_hides_nothing() -> None:
    far = 2**31 - 1
    view = Visibility(4, 4, far, far, 2)
    at = jnp.arange(4, dtype=jnp.int32)
    assert (view.first(at) < 0).all()
    assert (view.last(at) > 4).all()
    assert np.asarray(view.keep(at[:, None], at)).all()


def test_the_reference() -> None:
    for case in cases(50, *ALL, sizes=FEW):
        seen = visible(
            case.t, case.s, window=case.window, shift=case.shift, **case.arrays()
        )
        seen = np.broadcast_to(True if seen is None else seen, (1, 1, case.t, case.s))
        np.testing.assert_array_equal(seen[0, 0], case.table(), str(case))


def test_counts() -> None:
    for case in cases(300, "prefix"):
        if case.prefix is not None:
            case = replace(case, prefix=min(case.prefix, case.s))
        table = case.table()
        count = table.sum(), table.any(0).sum()
        assert case.visibility().count() == count, case
        at_most = case.visibility().count_at_most()
        assert case.prefix or (np.array(at_most) >= count).all(), case


def test_the_cost() -> None:
    for case in cases(100):
        shapes = {"q": (1, case.t, 1, 1), "k": (1, case.s, 1, 1)}
        shapes["v"] = shapes["k"]
        params = {"window": case.window, "shift": case.shift}
        dtypes = dict.fromkeys("qkv", "float32")
        assert cost(shapes, dtypes, params).flops == 4 * case.table().sum(), case


# ----------------------------------------------------------------------- blocks
def require_blocks(found: Any, table: np.ndarray, keys: int, what: Any) -> None:
    """Blocks left out are seen by no row, whole ones by all."""
    start, whole, part, end = (
        int(x) for x in (found.start, found.whole, found.part, found.end)
    )
    assert 0 <= start <= whole <= part <= end <= -(-table.shape[1] // keys), what
    assert end > start, what
    assert not table[:, : start * keys].any(), what
    assert not table[:, end * keys :].any(), what
    assert table[:, whole * keys : part * keys].all(), what
    assert part * keys <= table.shape[1] or part == whole, what


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (4, 3), (8, 16)])
def test_blocks(rows: int, keys: int) -> None:
    """`Visibility.blocks`, and what the Hopper kernels have, are equal and right."""
    for case in cases(200, "offset", "length", "prefix"):
        if case.prefix is not None and case.left is not None:
            continue  # no such kernel
        table = case.table()
        for first in range(0, case.t, rows):
            found = case.visibility().blocks(first, rows, keys)
            require_blocks(found, table[first : first + rows], keys, case)
            mask = Mask(case.t, case.s, *case.window, case.shift, more=True)
            given = (case.start, case.length, case.prefix)
            other = blocks_of(mask, first, rows, keys, *given)
            assert astuple(found) == astuple(other), case


def test_blocks_of_keys_and_queries_that_change_places() -> None:
    for case in cases(200, "prefix"):
        if case.left is not None or case.right is None:
            continue
        turned = Visibility(
            case.s, case.t, case.right, None, -case.shift, early=case.prefix
        )
        table = case.table().T
        keep = turned.keep(np.arange(case.s)[:, None], np.arange(case.t))
        np.testing.assert_array_equal(keep, table, str(case))
        for first in range(0, case.s, 4):
            found = turned.blocks(first, 4, 3)
            require_blocks(found, table[first : first + 4], 3, case)


def test_blocks_of_rows_that_are_averaged() -> None:
    for case in cases(300, "offset", "length"):
        table, count = case.table(), -(-case.s // 3)
        for first in range(0, case.t, 4):
            found = case.visibility().blocks(first, 4, 3, averages=True)
            tile = table[first : first + 4]
            if not tile.any(1).all():
                assert (found.start, found.end) == (0, count), case
            mask = Mask(
                case.t, case.s, *case.window, case.shift, case.length is not None,
                case.offset is not None, mean=True,
            )  # fmt: skip
            if mask.averages:
                given = (case.start, case.length)
                other = blocks_of(mask, first, 4, 3, *given)
                assert astuple(found) == astuple(other), case


def test_blocks_of_decoding() -> None:
    pages = Pages(8, 1, "pkzh", False)
    for case in cases(100, "offset", "length"):
        mask = Mask(case.t, case.s, *case.window, case.shift)
        config = Split(block_kv=64)
        p = Problem(1, 1, 1, 64, 64, mask, 1.0, None, pages, config)
        found = p.blocks(case.offset, case.length)
        require_blocks(found, case.table(), 64, case)
        other = case.visibility().blocks(0, case.t, 64)
        assert astuple(found) == astuple(other), case


def test_tiles_in_plain_jax() -> None:
    for case in cases(20, *ALL, sizes=FEW):
        given = {k: jnp.asarray(v) for k, v in case.arrays().items()}
        x = jnp.zeros((1, case.t, 1, 8))
        y = jnp.zeros((1, case.s, 1, 8))
        p = problem.problem_of(
            x, y, y,
            {**given, "window": case.window, "shift": case.shift,
             "config": Blocks(8, 8, 64, 64)},
        )  # fmt: skip
        z, table, step = p.sizes, case.table(), tiles.Step(p, 0)
        for i in range(z.blocks):
            block = tiles.Block(step, i)
            low, whole, high = (int(x) for x in block.bounds())
            at = int(block.start)
            rows = table[at : at + z.rows]
            assert not rows[:, : low * z.keys].any(), case
            assert not rows[:, high * z.keys :].any(), case
            if not case.segments:
                assert rows[:, low * z.keys : whole * z.keys].all(), case
            for j in range(whole, high):
                part = tile.Tile(block, j, True)
                key = int(part.start)
                want = rows[:, key : key + z.keys]
                fresh = key + np.arange(z.keys) >= int(part.nominal)
                got = np.ones((z.rows, z.keys), bool)
                for one in part.seen():
                    got = got & np.broadcast_to(one, (1, 1, 1, z.rows, z.keys))[0, 0, 0]
                np.testing.assert_array_equal(got, want & fresh, str(case))


def test_tables_of_blocks() -> None:
    for case in cases(200, *ALL):
        cut = schedule.Cut(case.t, case.s, 4, 3, *case.window, case.shift)
        made = np.asarray(schedule.states(cut, case.arrays()))[0]
        table = case.table()
        for i, j in np.ndindex(made.shape):
            tile = table[i * 4 : i * 4 + 4, j * 3 : j * 3 + 3]
            assert made[i, j] > 0 or not tile.any(), case
            assert made[i, j] < 2 or (tile.all() and tile.shape[1] == 3), case


@pytest.mark.parametrize("every", [False, True])
def test_pages(every: bool) -> None:
    for case in cases(50, "offset", "length", sizes=FEW):
        table = case.table()
        arrays = {k: jnp.asarray(v) for k, v in case.arrays().items()}
        made = paged.seen(
            1, case.t, case.s, arrays.get("kv_lengths"), arrays.get("offset"),
            case.window, case.shift, every,
        )  # fmt: skip
        first, last = int(made.first[0]), int(made.last[0])
        assert int(made.start[0]) == case.start
        columns = np.flatnonzero(table.any(0))
        if every and not table.any(1).all():
            assert (first, last) == (0, case.s - 1), case
        elif columns.size:
            assert (first, last) == (columns[0], columns[-1]), case
        else:
            assert first == last == 0, case


def test_turns_of_a_ring() -> None:
    sizes = itertools.product((1, 3, 4), (1, 2, 4))
    for (size, count), case in itertools.product(sizes, cases(40)):
        whole = Case(size * count, size * count, *case.window, case.shift).table()
        given = {
            turn.distance: turn for turn in turns(case.window, case.shift, size, count)
        }
        for device, distance in itertools.product(range(count), range(count)):
            turn, of = given.get(distance), (device - distance) % count
            view = turn and (turn.before if device >= distance else turn.around)
            mine = slice(device * size, (device + 1) * size)
            theirs = slice(of * size, (of + 1) * size)
            want = whole[mine, theirs]
            if view is None:
                assert not want.any(), case
                continue
            got = Case(size, size, *view.window, view.shift).table()
            np.testing.assert_array_equal(got, want, str(case))


def test_limits_that_hide_nothing_are_left_out() -> None:
    for case in cases(300):
        table, limits = case.table(), case.visibility().limits()
        if limits is None:
            assert not table.any(), case
            continue
        same = Case(case.t, case.s, *limits, case.shift).table()
        np.testing.assert_array_equal(same, table, str(case))
        assert (limits == (None, None)) <= table.all(), case
