"""Runs the Hopper kernels' own code without a GPU: a Python thread per warpgroup.

Memory, barriers and turns are modelled as far as the order of events goes. What the
hardware does at some time between two events is done at the worst time. A product is
computed when it is waited for. A store reads shared memory when it is waited for, and a
load writes it at once. A buffer that is handed on too early then gives wrong numbers, a
barrier that is never passed an error, and one that runs ahead by two phases too.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import (
    averaged_rows,
    backward_inputs,
    backward_kernel,
    backward_of_keys,
    backward_of_queries,
    backward_of_sums,
    backward_of_tables,
    backward_tiles,
    forward_kernel,
    forward_tile,
    pallas,
    panels,
    short_kernel,
    terms,
    use,
)
from rewriter.kernels.attention.hopper_decode import decode, kernel, merge, work_split
from rewriter.kernels.attention.hopper_latent import decode as latent_decode
from rewriter.kernels.attention.hopper_latent import kernel as latent_kernel
from rewriter.kernels.attention.hopper_latent import merge as latent_merge
from rewriter.kernels.cross_entropy import hopper_rows
from rewriter.kernels.group_norm import hopper_kernel as group_norm_kernel
from rewriter.kernels.norms import hopper_kernel as norms_kernel
from rewriter.kernels.norms import hopper_team as norms_team
from rewriter.kernels.norms import hopper_tiles as norms_tiles
from rewriter.kernels.quantized_dot.few_rows import instructions, threads, totals
from rewriter.kernels.quantized_dot.few_rows import kernel as few_rows
from rewriter.kernels.ragged.dot.hopper import (
    by_groups,
    by_rows,
    owners,
    schedule,
    store,
    widen,
)
from rewriter.kernels.shared import (
    pallas_gpu,
    pallas_gpu_rows,
    pallas_gpu_tiles,
    warpgroups,
    work_stealing,
)
from tests.support.kernels import lines

PATIENCE_S = 20.0


class Stuck(AssertionError):
    """A barrier was not passed, or was passed twice before it was waited for."""


class _Here(threading.local):
    """What belongs to one warpgroup."""

    warpgroup = 0
    program = 0
    programs = 1
    part = 0
    """The block's index in its cluster."""
    block: _Block

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.begun: list[Callable[[], None]] = []
        self.waits: dict[int, int] = {}


HERE = _Here()


class _Block:
    """What the warpgroups of a block share."""

    def __init__(self, warpgroups: int):
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.turns = [0] * warpgroups
        self.met: dict[range, int] = {}
        """How many warpgroups of a range came to wait for the others of it."""
        self.first: int | None = None
        """The warpgroup that goes as far as it can before another passes a wait."""
        self.first_waits: Callable[[], bool] | None = None

    def wait(self, passed: Callable[[], bool], what: str) -> None:
        mine = HERE.warpgroup
        with self.changed:
            done = lambda: self.failure is not None or (passed() and self.may_go(mine))
            if mine == self.first:
                self.first_waits = passed
                self.changed.notify_all()
            if not self.changed.wait_for(done, PATIENCE_S):
                raise Stuck(f"warpgroup {mine} waits for {what}")
            if mine == self.first:
                self.first_waits = None
            if self.failure is not None:
                raise Stuck("another warpgroup failed")

    def may_go(self, warpgroup: int) -> bool:
        if self.first in (None, warpgroup):
            return True
        return self.first_waits is not None and not self.first_waits()

    def meet(self, warpgroups: range) -> None:
        """Waits until all of some warpgroups are here."""
        with self.changed:
            before = self.met.get(warpgroups, 0)
            self.met[warpgroups] = before + 1
            self.changed.notify_all()
        wanted = (before // len(warpgroups) + 1) * len(warpgroups)
        self.wait(lambda: self.met[warpgroups] >= wanted, f"all of {warpgroups}")

    def ended(self, warpgroup: int) -> None:
        with self.changed:
            if warpgroup == self.first:
                self.first_waits = lambda: False
            self.changed.notify_all()


class Reference:
    """Memory: an array, or a part of one that may reach over its edge."""

    def __init__(self, array: np.ndarray, index: tuple[Any, ...] = ()):
        self.array, self.index = array, index

    @property
    def at(self) -> Any:
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view().shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def view(self) -> np.ndarray:
        at = [self.place(axis, i) for axis, i in enumerate(self.index)]
        return self.array[tuple(at)]

    def place(self, axis: int, index: Any) -> Any:
        if isinstance(index, slice):
            return index
        if not isinstance(index, pl.Slice):
            return int(index)  # an array of no axes would make a copy
        if index.size == self.array.shape[axis] == 1:
            return slice(0, 1)  # such an axis is dropped from copies, and its start
        return slice(int(index.start), int(index.start) + index.size)

    def sizes(self) -> list[int]:
        """Sizes of the part, also where it reaches over the edge."""
        rest = self.array.shape[len(self.index) :]
        return [i.size for i in self.index if isinstance(i, pl.Slice)] + list(rest)

    def __getitem__(self, index: Any) -> Any:
        return self.view()[index].copy()  # registers keep it when memory changes

    def __setitem__(self, index: Any, value: Any) -> None:
        place = self.view()
        assert place[index].shape == np.shape(value)
        place[index] = value

    def transpose(self, axes: tuple[int, ...]) -> Reference:
        return Reference(self.view().transpose(axes))


class _At:
    def __init__(self, reference: Reference):
        self.reference = reference

    def __getitem__(self, index: Any) -> Reference:
        index = index if isinstance(index, tuple) else (index,)
        if self.reference.index:
            return Reference(self.reference.view(), index)
        return Reference(self.reference.array, index)


class Barriers:
    """mbarriers: complete after so many arrivals, again and again."""

    def __init__(self, count: int, arrivals: int):
        self.arrivals = arrivals
        self.missing = [arrivals] * count
        self.completed = [0] * count
        self.anyway = False
        """Whether it may be passed at any time, by a warpgroup that is then ahead of
        the others: to try what happens then."""

    @property
    def at(self) -> Any:
        return _BarrierAt(self)


class _BarrierAt:
    def __init__(self, barriers: Barriers):
        self.barriers = barriers

    def __getitem__(self, index: Any) -> tuple[Barriers, int]:
        return self.barriers, int(index)


def _arrive(barrier: tuple[Barriers, int]) -> None:
    of, i = barrier
    with HERE.block.changed:
        of.missing[i] -= 1
        if of.missing[i] == 0:
            of.missing[i] = of.arrivals
            of.completed[i] += 1
        HERE.block.changed.notify_all()


def _wait(barrier: tuple[Barriers, int]) -> None:
    of, i = barrier
    if of.anyway:
        HERE.block.first = HERE.warpgroup
        return
    key = id(of) * 64 + i
    before = HERE.waits.get(key, 0)
    HERE.block.wait(lambda: of.completed[i] > before, f"phase {before}")
    if of.completed[i] > before + 1:
        raise Stuck("a barrier completed twice before it was waited for")
    HERE.waits[key] = before + 1


# -------------------------------------------------------------------- copies
def _load(
    source: Reference,
    target: Reference,
    barrier: tuple[Barriers, int],
    oob_mode: Any = None,
) -> None:
    place = target.view()
    if oob_mode is not None:
        assert place.shape == source.view().shape, "a copy reaches over the edge"
    place[...] = 0
    got = source.view()
    place[tuple(slice(0, size) for size in got.shape)] = got
    _arrive(barrier)


def _store(
    source: Reference,
    target: Reference,
    reduction_op: str | None = None,
    commit_group: bool = True,
) -> None:
    def run() -> None:
        place = target.view()
        assert list(source.shape) == target.sizes()
        new = source.view()[tuple(slice(0, size) for size in place.shape)]
        with HERE.block.changed:
            place[...] = new if reduction_op is None else place + new

    HERE.begun.append(run)
    if commit_group:
        _commit_stores()


def _commit_stores() -> None:
    """Makes one of the stores since the last time, to be waited for together."""
    together, HERE.begun = HERE.begun, []
    HERE.stores.append(lambda: [run() for run in together] and None)


def _wait_for_stores(left: int, wait_read_only: bool = False) -> None:
    del wait_read_only
    while len(HERE.stores) > left:
        HERE.stores.pop(0)()


# ------------------------------------------------------------------ products
class Accumulator:
    def __init__(self, kind: Any):
        self.value = np.zeros(kind.shape, kind.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        assert index is ...
        return _result(self, 0)

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        assert index is ...
        self.value = np.array(value, self.value.dtype)


def _wait_for_products(left: int) -> None:
    while len(HERE.products) > left:
        HERE.products.pop(0)()


def _result(accumulator: Accumulator, wait_n: int = 0) -> np.ndarray:
    _wait_for_products(wait_n)
    return accumulator.value.copy()


def _add_product_of_rows(
    total: np.ndarray, left: Reference, right: Reference
) -> np.ndarray:
    """Adds to `total` itself, when it is waited for."""

    def run() -> None:
        a, b = (np.concatenate(list(x.view()), 1) for x in (left, right))
        total[...] += a.astype(np.float32).T @ b.astype(np.float32)

    HERE.products.append(run)
    return total


def _add_product(total: np.ndarray, left: Reference, right: Reference) -> np.ndarray:
    """Adds to `total` itself, when it is waited for."""

    def run() -> None:
        a, b = left.view(), np.concatenate(list(right.view()), 1)
        total[...] += a.astype(np.float32) @ b.astype(np.float32)

    HERE.products.append(run)
    return total


def _add_product_of_panels(
    total: np.ndarray, left: Any, right: Reference, turned: bool, begins: bool
) -> np.ndarray:
    """Returns a new total, which is computed when it is waited for."""
    del begins
    made = np.full(np.shape(total), np.nan, np.float32)

    def run() -> None:
        a = left.view() if isinstance(left, Reference) else left
        a, b = a.T if turned else a, np.concatenate(list(right.view()), 1)
        made[...] = total + a.astype(np.float32) @ b.astype(np.float32)

    HERE.products.append(run)
    return made


def _claim(counter: Reference, cell: Reference) -> None:
    last = (0,) * (len(counter.shape) - 1) + (-1,)
    cell[0] = counter[last]
    counter[last] += 1


def _widened(
    narrow: Reference,
    wide: Reference,
    steps: Sequence[tuple[str, Any]] = (),
    joined: Sequence[Reference] = (),
    axis: int = 1,
) -> None:
    x = narrow.view().astype(np.float32)
    for sign, what in steps:
        if sign == "round":
            x = x.astype(what).astype(np.float32)
            continue
        if isinstance(what, int):
            what = np.expand_dims(joined[what].view().astype(np.float32), 1 - axis)
        x = {"*": np.multiply, "-": np.subtract, "+": np.add}[sign](x, what)
        x = x.astype(np.float32)
    wide[...] = x.astype(wide.dtype)


def _row(reference: Reference, first: int, shape: tuple[int, int]) -> np.ndarray:
    first = min(first, reference.shape[0] - shape[1])
    return np.broadcast_to(reference.view()[first : first + shape[1]], shape)


def _column(reference: Reference, first: int, shape: tuple[int, int]) -> np.ndarray:
    assert first % shape[0] == 0
    assert first + shape[0] <= reference.shape[0], "no such rows"
    return np.broadcast_to(reference.view()[first : first + shape[0], None], shape)


def _multiply(accumulator: Accumulator, a: Any, b: Reference) -> None:
    def run() -> None:
        left = a.view() if isinstance(a, Reference) else a
        dtype = accumulator.value.dtype
        product = left.astype(dtype) @ b.view().astype(dtype)
        accumulator.value = accumulator.value + product

    HERE.products.append(run)


def _scoped(body: Callable[..., Any], *kinds: Any) -> Any:
    return body(*(Accumulator(kind) for kind in kinds))


# ------------------------------------------------------------------- kernels
def _kernel(
    body: Callable[..., None], name: str, out: Any, scratch: Any, programs: int,
    warpgroups: int, cluster: int = 1, cluster_name: str = "",
) -> Callable[..., Any]:  # fmt: skip
    def call(*given: Any) -> list[np.ndarray]:
        results = [_poison(x.shape, x.dtype) for x in out]
        references = [Reference(np.asarray(x)) for x in (*given, *results)]
        for program, part in np.ndindex(programs, cluster):
            memory = {name: _allocated(kind) for name, kind in scratch.items()}
            run = functools.partial(body, *references, **memory)
            block = _Block(warpgroups)
            threads = [
                threading.Thread(
                    target=_warpgroup,
                    args=(block, (program, programs, part), w, run),
                )
                for w in range(warpgroups)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if block.failure is not None:
                raise block.failure
        return results

    del name, cluster_name
    return call


def _warpgroup(
    block: _Block, program: tuple[int, int, int], warpgroup: int,
    run: Callable[[], None],
) -> None:  # fmt: skip
    HERE.block, HERE.warpgroup = block, warpgroup
    HERE.program, HERE.programs, HERE.part = program
    try:
        with np.errstate(all="ignore"):
            run()
        assert not HERE.begun, "a store was not committed"
        assert not HERE.stores, "a store was not waited for"
        assert not HERE.products, "a product was not waited for"
    except BaseException as problem:
        with block.changed:
            block.failure = block.failure or problem
            block.changed.notify_all()
    block.ended(warpgroup)


def _poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, np.iinfo(dtype).max, dtype)
    return np.full(shape, np.nan, dtype)


def _allocated(kind: Any) -> Any:
    if isinstance(kind, list):
        return [_allocated(part) for part in kind]
    if isinstance(kind, dict):
        return {name: _allocated(part) for name, part in kind.items()}
    if isinstance(kind, plgpu.Barrier):
        return Barriers(int(np.prod(kind.num_barriers)), kind.num_arrivals)
    if isinstance(kind, plgpu.RefUnion):
        size = max(sum(map(_nbytes, jax.tree.leaves(part))) for part in kind.refs)
        flat = np.full(size, 255, np.uint8)  # NaN in every float
        return tuple(_views(flat, part) for part in kind.refs)
    return Reference(_poison(kind.shape, kind.dtype))


def _nbytes(kind: Any) -> int:
    return int(np.prod(kind.shape)) * np.dtype(kind.dtype).itemsize


def _views(flat: np.ndarray, part: Any) -> Any:
    """References to memory that is laid out as a tree of kinds, one after another."""
    kinds, tree = jax.tree.flatten(part)
    ends = np.cumsum([_nbytes(kind) for kind in kinds])
    views = [
        flat[end - _nbytes(kind) : end].view(kind.dtype).reshape(kind.shape)
        for kind, end in zip(kinds, ends, strict=True)
    ]
    return tree.unflatten([Reference(x) for x in views])


# ------------------------------------------------------------- what is replaced
def _for(start: Any, end: Any, body: Callable[[int, Any], Any], carry: Any) -> Any:
    for i in range(int(start), int(end)):
        carry = body(i, carry)
    return carry


def _while(
    condition: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any
) -> Any:
    while condition(carry):
        carry = body(carry)
    return carry


def _axis_index(name: str) -> int:
    if name == few_rows.PART:
        return HERE.part
    return HERE.warpgroup if name == pallas.WARPGROUP else HERE.program


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: list[int]) -> np.ndarray:
    return np.broadcast_to(x[:, None] if axes == [0] else x[None], shape)


def _einsum(form: str, *arrays: Any, preferred_element_type: Any = None) -> np.ndarray:
    dtype = preferred_element_type or np.float32
    return np.einsum(form, *(np.asarray(x, dtype) for x in arrays))


def _hide(
    scores: np.ndarray, first: Any, last: Any, fill: Any = None, end: Any = None
) -> np.ndarray:
    column = np.arange(scores.shape[1])[None]
    keep = np.ones(scores.shape, bool) if last is None else column <= last[:, None]
    if first is not None:
        keep = keep & (column >= first[:, None])
    other = np.full(scores.shape, -np.inf, np.float32)
    if fill is not None:
        other = np.where(column <= end[:, None], fill[:, None], other)
    return np.where(keep, scores, other)


LATE_S = 0.0
"""How long the first warpgroup of a team takes to read the sums of all."""


def _sums(values: Sequence[Any], shared: Reference, warpgroups: int) -> list[Any]:
    return _joined(np.sum, values, shared, warpgroups)


def _maxima(values: Sequence[Any], shared: Reference, warpgroups: int) -> list[Any]:
    return _joined(np.max, values, shared, warpgroups)


def _joined(
    join: Any, values: Sequence[Any], shared: Reference, warpgroups: int
) -> list[Any]:
    team, part = divmod(HERE.warpgroup, warpgroups)
    place = shared.view()
    assert place.shape == (len(values), 4 * warpgroups)
    for row, value in zip(place, values, strict=True):
        row[4 * part : 4 * part + 4] = join(value.reshape(4, -1), 1)
    HERE.block.meet(range(team * warpgroups, (team + 1) * warpgroups))
    if part == 0:
        time.sleep(LATE_S)
    return list(join(place, 1))


def _write(reference: Reference, value: np.ndarray) -> None:
    assert value.dtype == reference.dtype
    reference[...] = value


def _applied(
    function: Any, products: np.ndarray, rows: np.ndarray, column: np.ndarray,
    read: Any, *, most: int, turned: bool, slope: bool,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The program of a function, line by line, by JAX for all numbers of a tile."""
    shape, of = products.shape, dict(function.dtypes)
    assert most is not None
    assert max(rows.max(), column[0] + shape[1] - 1) <= most
    columns = np.broadcast_to(column[0] + np.arange(shape[1], dtype=np.int32), shape)
    rows = np.broadcast_to(rows[:, None], shape)
    given = [products, *((columns, rows) if turned else (rows, columns))]
    for x, name in zip(read.arrays, function.arrays, strict=True):
        given.append(np.asarray(x).astype(of[name]))
    for look, table, start in zip(
        function.lookups, read.tables, read.starts, strict=True
    ):
        place, index = lines.evaluated(look.place, given)
        found = np.asarray(table.view())[start[0] + np.asarray(place)]
        given += lines.evaluated(look.found, [found.astype(of[look.table]), index])
    made = lines.evaluated(function.value_and_slope if slope else function.value, given)
    return tuple(np.broadcast_to(np.asarray(x, np.float32), shape) for x in made)


def _sloped(scores: np.ndarray, first: np.ndarray, slope: np.ndarray) -> np.ndarray:
    columns = np.arange(scores.shape[1], dtype=np.float32)[None]
    return scores + (first[:, None] + slope[:, None] * columns)


def _wait_for_turn(warpgroups: int) -> None:
    del warpgroups
    block, mine = HERE.block, HERE.warpgroup
    block.wait(lambda: block.turns[mine] > 0, "its turn")
    block.turns[mine] -= 1


def _pass_turn(warpgroups: int) -> None:
    with HERE.block.changed:
        HERE.block.turns[(HERE.warpgroup + 1) % warpgroups] += 1
        HERE.block.changed.notify_all()


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def _replaced(kernels: Sequence[Any], shims: Any) -> Iterator[pytest.MonkeyPatch]:
    """Replaces what modules of kernels, and the one of what they share, import."""
    gpu = _Instead(
        plgpu,
        set_max_registers=lambda *_, **__: None,
        barrier_wait=_wait,
        barrier_arrive=_arrive,
        copy_gmem_to_smem=_load,
        copy_smem_to_gmem=_store,
        commit_smem_to_gmem_group=_commit_stores,
        wait_smem_to_gmem=_wait_for_stores,
        commit_smem=lambda: None,
        wgmma=_multiply,
        wgmma_wait=_wait_for_products,
        wgmma_accumulator_load=_result,
        layout_cast=lambda x, _: x,
    )
    plain = _Instead(
        lax,
        fori_loop=_for,
        while_loop=_while,
        rem=lambda x, y: int(x) % int(y),
        div=lambda x, y: int(x) // int(y),
        axis_index=_axis_index,
        axis_size=lambda _: HERE.programs,
        rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        broadcast_in_dim=_broadcast,
        optimization_barrier=lambda x: x,
        cond=lambda condition, yes, no: yes() if condition else no(),
    )
    of_kernels = _Instead(
        pl,
        run_scoped=_scoped,
        multiple_of=lambda x, _: x,
    )
    changed = {"plgpu": gpu, "lax": plain, "jnp": _Instead(np, einsum=_einsum)}
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in (*kernels, shims, warpgroups):
            for name, new in (*changed.items(), ("pl", of_kernels)):
                patch.setattr(module, name, new, raising=False)
        patch.setattr(shims, "kernel", _kernel)
        for module in (shims, pallas_gpu):
            when = lambda yes: lambda body: body() if yes else None
            patch.setattr(module, "when", when)
        yield patch


@contextmanager
def simulated() -> Iterator[None]:
    """Within, the kernels of attention take numpy arrays and run on the simulator."""
    kernels = (
        use, forward_kernel, forward_tile, backward_inputs, backward_kernel,
        backward_tiles, backward_of_keys, backward_of_queries, backward_of_sums,
        backward_of_tables, averaged_rows, work_stealing, terms, panels, short_kernel,
    )  # fmt: skip
    with _replaced(kernels, pallas) as patch:
        _count(patch, backward_kernel, work_stealing)
        patch.setattr(pallas, "wait_for_turn", _wait_for_turn)
        patch.setattr(pallas, "pass_turn", _pass_turn)
        _replace_shims(patch)
        patch.setattr(backward_kernel, "complete_if_any_empty", _if_any)
        yield


def _if_any(empty: Any, grads: dict[str, Any], completed: Any) -> dict[str, Any]:
    """Chooses at once: the arrays have numbers."""
    made = grads | (completed(grads) if np.asarray(empty).any() else {})
    return {n: np.asarray(x).astype(grads[n].dtype) for n, x in made.items()}


@contextmanager
def simulated_decode() -> Iterator[None]:
    """Within, those of attention of few queries do."""
    latent = latent_decode, latent_kernel, latent_merge
    of_keys = decode, kernel, work_split, merge, panels
    with _replaced((*of_keys, *latent), pallas) as patch:
        _count(patch, latent_merge)
        _replace_shims(patch)
        yield


def _replace_shims(patch: pytest.MonkeyPatch) -> None:
    """Replaces what attention needs of Pallas."""
    patch.setattr(
        pallas, "zeros", lambda shape, value=0.0: np.full(shape, value, np.float32)
    )
    patch.setattr(pallas, "rows", lambda value: np.full((64,), value, np.int32))
    patch.setattr(pallas, "row_positions", lambda n: np.arange(n, dtype=np.int32))
    patch.setattr(pallas, "sloped", _sloped)
    for name in ("loaded", "read"):
        patch.setattr(pallas, name, lambda x, layout: x.view().copy())
    patch.setattr(pallas, "store_rows", lambda x, value: x.__setitem__(..., value))
    patch.setattr(pallas, "hide", _hide)
    by_eights = lambda x: x.reshape(len(x), -1, 8).sum(1)
    patch.setattr(pallas, "by_eights", by_eights)
    patch.setattr(pallas, "hold", lambda x: None)
    patch.setattr(pallas, "widened", lambda x: np.asarray(x).astype(np.float32))
    patch.setattr(pallas, "least", np.fmin)
    patch.setattr(terms, "applied", _applied)
    patch.setattr(pallas_gpu, "add_product_of_panels", _add_product_of_panels)


def _count(patch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Replaces memory that kernels change, and how they count in it."""
    for module in modules:
        patch.setattr(module, "jax", _Instead(jax, new_ref=np.array))
    patch.setattr(pallas_gpu, "claim", _claim)


@contextmanager
def simulated_ragged_dot() -> Iterator[None]:
    """Within, those of ragged dots and gated linear units do."""
    modules = by_rows, by_groups, owners, work_stealing, widen, schedule, store
    with _replaced(modules, pallas_gpu) as patch:
        _count(patch, by_rows, by_groups, work_stealing)
        patch.setattr(pallas_gpu, "zeros", lambda shape: np.zeros(shape, np.float32))
        patch.setattr(pallas_gpu, "add_product", _add_product)
        patch.setattr(pallas_gpu, "add_product_of_rows", _add_product_of_rows)
        patch.setattr(pallas_gpu, "row", _row)
        patch.setattr(pallas_gpu, "column", _column)
        patch.setattr(pallas_gpu, "widened", _widened)
        yield


def _multiply_stored(
    sums: list[np.ndarray], right: Reference, left: Sequence[Reference],
    joined: Sequence[Reference], groups: Sequence[int], use: Any,
) -> list[np.ndarray]:  # fmt: skip
    """Sums of 64 columns each, of the transposed product."""
    tiles = right.view()
    tiles = tiles.transpose(0, 2, 1) if use.transposed else tiles
    numbers = np.concatenate(list(tiles), 1).astype(np.float32)
    places = [
        np.minimum(np.arange(len(numbers)) // group, x.shape[0] - 1)
        for x, group in zip(joined, groups, strict=True)
    ]
    values = [
        x.view().astype(np.float32)[at] for x, at in zip(joined, places, strict=True)
    ]
    wide = _after_steps(numbers, use.steps.steps, values).astype(use.steps.dtype)
    rows = np.concatenate([x.view() for x in left], 1).astype(np.float32)
    product = (rows @ wide.astype(np.float32)).T
    return [
        x + y for x, y in zip(sums, product.reshape(len(sums), 64, -1), strict=True)
    ]


def _after_steps(x: np.ndarray, steps: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    for sign, what in steps:
        if sign == "round":
            x = x.astype(what).astype(np.float32)
            continue
        other = np.float32(values[what] if isinstance(what, int) else what)
        x = {"*": np.multiply, "-": np.subtract, "+": np.add}[sign](x, other)
    return x


@contextmanager
def simulated_few_rows() -> Iterator[None]:
    """Within, that of quantized dots of few rows does; clusters block by block."""
    before: dict[int, np.ndarray] = {}

    def add_up(
        partial: Reference, out: Reference, behind: Sequence[Reference], config: Any,
        steps: Any,
    ) -> None:  # fmt: skip
        if HERE.warpgroup:
            return
        total = before.get(HERE.program, 0) + partial.view().sum(0)
        before[HERE.program] = total
        if HERE.part == config.splits - 1:
            values = [x.view()[None] for x in behind]
            done = _after_steps(before.pop(HERE.program), steps, values)
            out[...] = done[: out.shape[0]].astype(out.dtype)

    def store_sums(sums: list[np.ndarray], partial: Reference, use: Any) -> None:
        del use
        partial[...] = np.concatenate(sums).T

    with _replaced((few_rows,), pallas_gpu) as patch:
        zeros = lambda shape: np.zeros(shape, np.float32)
        patch.setattr(pallas_gpu, "zeros", zeros)
        every = lambda: HERE.block.meet(range(len(HERE.block.turns)))
        patch.setattr(threads, "meet", every)
        patch.setattr(instructions, "multiply", _multiply_stored)
        patch.setattr(totals, "store_sums", store_sums)
        patch.setattr(totals, "add_up", add_up)
        yield


@contextmanager
def simulated_rows_of_logits() -> Iterator[None]:
    """Within, that of sums of exponentials and gradients of rows of logits does."""
    with _replaced((hopper_rows,), pallas_gpu) as patch:
        _replace_rows(patch)
        yield


@contextmanager
def simulated_norms() -> Iterator[None]:
    """Within, those of norms of rows do."""
    kernels = norms_kernel, norms_team, norms_tiles, group_norm_kernel
    with _replaced(kernels, pallas_gpu) as patch:
        _replace_rows(patch)
        _replace_tiles(patch)
        yield


def _replace_tiles(patch: pytest.MonkeyPatch) -> None:
    """Replaces what kernels of tiles of rows need of Pallas."""
    tiles = pallas_gpu_tiles
    patch.setattr(tiles, "zeros", lambda shape: np.zeros(shape, np.float32))
    patch.setattr(tiles, "row_positions", lambda: np.arange(tiles.HEIGHT))
    patch.setattr(tiles, "row_pairs", _row_pairs)
    patch.setattr(pallas_gpu, "loaded", lambda x, layout, **_: x.view().copy())
    patch.setattr(pallas_gpu, "store_rows", lambda x, value: x.__setitem__(..., value))


def _row_pairs(x: np.ndarray) -> np.ndarray:
    """Sums of two rows, eight apart; groups of eight columns take turns as rows."""
    both = x.reshape(4, 2, 8, -1, 2, 8).sum(1)  # warps, lanes, groups, two, columns
    return both.transpose(0, 3, 1, 2, 4).reshape(len(x), -1)


def _replace_rows(patch: pytest.MonkeyPatch) -> None:
    """Replaces what kernels of rows need of Pallas."""
    every = lambda: HERE.block.meet(range(len(HERE.block.turns)))
    f32 = lambda shape: np.zeros(shape, np.float32)
    patch.setattr(pallas_gpu_rows, "row_sums", _sums)
    patch.setattr(pallas_gpu_rows, "row_maxima", _maxima)
    patch.setattr(pallas_gpu_rows, "zeros", f32)
    patch.setattr(pallas_gpu_rows, "store", _write)
    patch.setattr(pallas_gpu_rows, "wait_for_block", every)
    patch.setattr(pallas_gpu_rows, "loaded", lambda x: x.view().astype(np.float32))
