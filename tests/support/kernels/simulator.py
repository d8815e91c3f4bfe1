"""Runs the Hopper kernels' own code without a GPU: a Python thread per warpgroup.

Memory, barriers and turns are modelled as far as the order of events goes. What the
hardware does at some time between two events is done at the worst time. A product is
computed when it is waited for. A store reads shared memory when it is waited for, and a
load writes it at once. A buffer that is handed on too early then gives wrong numbers, a
barrier that is never passed an error, and one that runs ahead by two phases too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxpr_as_fun

from rewriter.kernels.activations import hopper_kernel as activations
from rewriter.kernels.attention import fills
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
from rewriter.kernels.attention.hopper_stored import (
    instructions as stored_instructions,
)
from rewriter.kernels.attention.hopper_stored import kernel as stored_attention
from rewriter.kernels.cross_entropy import hopper_rows
from rewriter.kernels.group_norm import hopper_kernel as group_norm_kernel
from rewriter.kernels.linear_cross_entropy import hopper_of_weights as of_weights
from rewriter.kernels.norms import hopper_kernel as norms_kernel
from rewriter.kernels.norms import hopper_team as norms_team
from rewriter.kernels.norms import hopper_tiles as norms_tiles
from rewriter.kernels.quantized_dot.few_rows import instructions, threads, totals
from rewriter.kernels.quantized_dot.few_rows import kernel as few_rows
from rewriter.kernels.quantized_dot.few_rows import units as few_rows_units
from rewriter.kernels.quantized_rows import hopper_kernel as quantized_rows
from rewriter.kernels.ragged.dot.hopper import (
    by_groups,
    by_rows,
    owners,
    schedule,
    store,
    widen,
)
from rewriter.kernels.shared import (
    counters,
    pallas_gpu,
    pallas_gpu_rows,
    pallas_gpu_tiles,
    warpgroups,
    work_stealing,
)
from rewriter.ops.activations import ACTIVATIONS
from tests.support.kernels.simulated_gpu import (
    copies,
    launch,
    machine,
    products,
    stand_ins,
)


@contextmanager
def _replaced(kernels: Sequence[Any], shims: Any) -> Iterator[pytest.MonkeyPatch]:
    """Replaces what modules of kernels, and the one of what they share, import."""
    gpu = stand_ins.Instead(
        plgpu,
        set_max_registers=lambda *_, **__: None,
        barrier_wait=machine.wait_for_barrier,
        barrier_arrive=machine.arrive_at_barrier,
        copy_gmem_to_smem=copies.copy_in,
        copy_smem_to_gmem=copies.begin_store,
        commit_smem_to_gmem_group=copies.commit_stores,
        wait_smem_to_gmem=copies.wait_for_stores,
        commit_smem=lambda: None,
        wgmma=products.multiply,
        wgmma_wait=products.wait_for_products,
        wgmma_accumulator_load=products.result,
        layout_cast=lambda x, _: x,
    )
    plain = stand_ins.Instead(
        lax,
        fori_loop=stand_ins.for_loop,
        while_loop=stand_ins.while_loop,
        rem=lambda x, y: int(x) % int(y),
        div=lambda x, y: int(x) // int(y),
        axis_index=stand_ins.axis_index,
        axis_size=lambda _: machine.HERE.programs,
        rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        broadcast_in_dim=stand_ins.broadcast,
        optimization_barrier=lambda x: x,
        cond=lambda condition, yes, no: yes() if condition else no(),
    )
    of_kernels = stand_ins.Instead(
        pl,
        run_scoped=products.scoped,
        multiple_of=lambda x, _: x,
    )
    changed = {
        "plgpu": gpu,
        "lax": plain,
        "jnp": stand_ins.Instead(np, einsum=stand_ins.einsum),
    }
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in (*kernels, shims, warpgroups):
            for name, new in (*changed.items(), ("pl", of_kernels)):
                patch.setattr(module, name, new, raising=False)
        patch.setattr(shims, "kernel", launch.run_kernel)
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
        patch.setattr(pallas, "wait_for_turn", stand_ins.wait_for_turn)
        patch.setattr(pallas, "pass_turn", stand_ins.pass_turn)
        _replace_shims(patch)
        patch.setattr(backward_kernel, "complete_if_any_empty", _if_any)
        patch.setattr(fills, "either", lambda x, first, then: then() if x else first())
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
    patch.setattr(pallas, "sloped", stand_ins.sloped)
    for name in ("loaded", "read"):
        patch.setattr(pallas, name, lambda x, layout: x.view().copy())
    patch.setattr(pallas, "store_rows", lambda x, value: x.__setitem__(..., value))
    patch.setattr(pallas, "hide", stand_ins.hidden)
    by_eights = lambda x: x.reshape(len(x), -1, 8).sum(1)
    patch.setattr(pallas, "by_eights", by_eights)
    patch.setattr(pallas, "hold", lambda x: None)
    patch.setattr(pallas, "widened", lambda x: np.asarray(x).astype(np.float32))
    patch.setattr(pallas, "least", np.fmin)
    patch.setattr(terms, "applied", stand_ins.applied)
    patch.setattr(pallas_gpu, "add_product_of_panels", products.add_product_of_panels)


def _count(patch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Replaces memory that kernels change, and how they count in it."""
    for module in modules:
        patch.setattr(module, "jax", stand_ins.Instead(jax, new_ref=np.array))
    patch.setattr(pallas_gpu, "claim", products.claim)


@contextmanager
def simulated_ragged_dot() -> Iterator[None]:
    """Within, those of ragged dots and gated linear units do."""
    modules = by_rows, by_groups, owners, work_stealing, widen, schedule, store
    with _replaced((*modules, of_weights), pallas_gpu) as patch:
        _count(patch, by_rows, by_groups, work_stealing, of_weights)
        patch.setattr(counters, "count", machine.count)
        patch.setattr(counters, "wait_for", machine.wait_for_count)
        patch.setattr(pallas_gpu, "zeros", lambda shape: np.zeros(shape, np.float32))
        patch.setattr(pallas_gpu, "add_product", products.add_product)
        patch.setattr(pallas_gpu, "add_product_of_rows", products.add_product_of_rows)
        patch.setattr(pallas_gpu, "row", products.row_of)
        patch.setattr(pallas_gpu, "column", products.column_of)
        patch.setattr(pallas_gpu, "widened", products.widened)
        yield


def _multiply_stored(
    sums: list[np.ndarray], right: machine.Reference, left: Sequence[machine.Reference],
    joined: Sequence[machine.Reference], groups: Sequence[int], use: Any,
) -> list[np.ndarray]:  # fmt: skip
    """Sums of 64 columns each, of the transposed product."""
    tiles = _numbers(right.view(), use)
    turned = use.transposed and use.packed != "first"
    if use.codebook:
        *joined, table = joined
        tiles = table.view()[tiles]
    tiles = tiles.transpose(0, 2, 1) if turned else tiles
    numbers = np.concatenate(list(tiles), 1).astype(np.float32)
    given = [x.view().astype(np.float32) for x in joined]
    given = [x.T for x in given] if use.turned else given
    places = [
        np.minimum(np.arange(len(numbers)) // group, x.shape[0] - 1)
        for x, group in zip(given, groups, strict=True)
    ]
    values = [
        x[0][:, None] if use.by_rows else x[at]
        for x, at in zip(given, places, strict=True)
    ]
    wide = _after_steps(numbers, use.steps.steps, values).astype(use.steps.dtype)
    rows = np.concatenate([x.view() for x in left], 1).astype(np.float32)
    if use.alternating and not use.config.by_warps:
        count = 8 if "4" in use.stored and "8" not in use.stored else 4
        order = np.asarray(few_rows.alternating(jax.numpy.arange(rows.shape[1]), count))
        rows = rows[:, np.argsort(order)]
    product = (rows @ wide.astype(np.float32)).T
    return [
        x + y for x, y in zip(sums, product.reshape(len(sums), 64, -1), strict=True)
    ]


def _numbers(tiles: np.ndarray, use: Any) -> np.ndarray:
    """The numbers of tiles [tiles, rows, columns], whose elements may hold several."""
    if use.each == 1:
        return tiles
    axis = 1 if use.packed == "first" else 2
    bits = tiles.dtype.itemsize * 8 // use.each
    words = tiles.view(f"uint{8 * tiles.dtype.itemsize}")
    parts = [(words >> (bits * i)) & (2**bits - 1) for i in range(use.each)]
    if use.places:
        parts = [parts[place] for place in use.places]
    numbers = np.stack(parts, axis + 1).astype(np.int32)
    if use.stored == "int4":
        numbers = (numbers ^ 8) - 8
    shape = list(tiles.shape)
    shape[axis] *= use.each
    return numbers.reshape(shape)


def _add_joined(
    sums: list[np.ndarray], products: list[np.ndarray], right: machine.Reference,
    joined: Sequence[machine.Reference], use: Any,
) -> list[np.ndarray]:  # fmt: skip
    """Sums of 64 columns each, with scales of columns of a part's products."""
    del right
    values = [x.view()[0].astype(np.float32)[:, None] for x in joined]
    made = _after_steps(np.concatenate(products), use.inside.steps, values)
    parts = made.reshape(len(sums), 64, -1)
    return [x + y for x, y in zip(sums, parts, strict=True)]


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
        partial: machine.Reference, out: machine.Reference,
        behind: Sequence[machine.Reference], config: Any, steps: Any,
    ) -> None:  # fmt: skip
        if machine.HERE.warpgroup:
            return
        total = before.get(machine.HERE.program, 0) + partial.view().sum(0)
        before[machine.HERE.program] = total
        if machine.HERE.part == config.splits - 1:
            values = [x.view()[None] for x in behind]
            done = _after_steps(before.pop(machine.HERE.program), steps, values)
            out[...] = done[: out.shape[0]].astype(out.dtype)

    def join_branches(
        partial: machine.Reference, out: machine.Reference,
        behind: Sequence[Sequence[machine.Reference]], config: Any, steps: Any,
        activation: tuple[str, float],
    ) -> None:  # fmt: skip
        if machine.HERE.warpgroup:
            return
        total = before.get(machine.HERE.program, 0) + partial.view().sum(0)
        before[machine.HERE.program] = total
        if machine.HERE.part == config.splits - 1:
            half = total.shape[1] // 2
            sums = total[:, :half], total[:, half:]
            gate, up = (
                _after_steps(x, steps, [b.view()[None] for b in own])
                for x, own in zip(sums, behind, strict=True)
            )
            del before[machine.HERE.program]
            name, beta = activation
            done = np.asarray(ACTIVATIONS[name](gate, beta)) * up
            out[...] = done[: out.shape[0]].astype(out.dtype)

    def store_sums(
        sums: list[np.ndarray], partial: machine.Reference, use: Any
    ) -> None:
        del use
        partial[...] = np.concatenate(sums).T

    with _replaced((few_rows, few_rows_units), pallas_gpu) as patch:
        zeros = lambda shape: np.zeros(shape, np.float32)
        patch.setattr(pallas_gpu, "zeros", zeros)
        every = lambda: machine.HERE.block.meet(range(len(machine.HERE.block.turns)))
        patch.setattr(threads, "meet", every)
        patch.setattr(instructions, "multiply", _multiply_stored)
        patch.setattr(instructions, "add_joined", _add_joined)
        patch.setattr(totals, "store_sums", store_sums)
        patch.setattr(totals, "add_up", add_up)
        patch.setattr(totals, "join_branches", join_branches)
        yield


@contextmanager
def simulated_stored_attention() -> Iterator[None]:
    """Within, that of few queries against stored keys does; clusters block by block."""
    before: dict[int, list[tuple[np.ndarray, ...]]] = {}

    def combine(
        partial: machine.Reference, stats: machine.Reference, out: machine.Reference,
        lse: machine.Reference | None, splits: int, zero: bool,
    ) -> None:  # fmt: skip
        if machine.HERE.warpgroup:
            return
        own = before.setdefault(machine.HERE.program, [])
        own += zip(partial.view().copy(), stats.view().copy(), strict=True)
        if machine.HERE.part < splits - 1:
            return
        parts, tops = (
            np.stack(x) for x in zip(*before.pop(machine.HERE.program), strict=True)
        )
        highest, count = tops[:, 0].max(0), out.shape[0]
        fade = np.exp2(tops[:, 0] - highest)
        total = (tops[:, 1] * fade).sum(0)
        made = (parts * fade[..., None]).sum(0) / total[:, None]
        if zero:
            made = np.where(highest[:, None] == -np.inf, 0.0, made)
        out[...] = made[:count].astype(out.dtype)
        if lse is not None:
            logs = np.log2(total) + highest
            lse[...] = np.where(highest == -np.inf, highest, logs)[:count]

    def over_keys(x: np.ndarray, scratch: machine.Reference, verb: str) -> np.ndarray:
        del scratch
        return np.broadcast_to({"max": np.max, "add": np.sum}[verb](x, 0), x.shape)

    def times_rows(
        x: np.ndarray, lines: machine.Reference, head: int, heads: int, part: int
    ) -> np.ndarray:
        every = lines.view().reshape(-1, heads)[64 * part :][:64, head]
        return x * every.astype(np.float32)[:, None]

    def store_sums(
        sums: list[np.ndarray], partial: machine.Reference, use: Any
    ) -> None:
        del use
        partial[...] = np.concatenate(sums).T

    def store_queries(
        source: machine.Reference, place: machine.Reference, first: int, word: int
    ) -> None:
        rows = np.zeros((place.shape[0], source.shape[1]), place.dtype)
        rows[: source.shape[0]] = source.view()
        turned = few_rows.alternating(jax.numpy.asarray(rows), word)
        place[...] = np.asarray(turned)[:, first : first + place.shape[1]]

    with _replaced((stored_attention, pallas), pallas_gpu) as patch:
        _replace_shims(patch)
        patch.setattr(pallas_gpu, "zeros", lambda shape: np.zeros(shape, np.float32))
        as_it_is = lambda x, layout, optimized=True: x.view().copy()
        patch.setattr(pallas_gpu, "loaded", as_it_is)
        every = lambda: machine.HERE.block.meet(range(len(machine.HERE.block.turns)))
        patch.setattr(threads, "meet", every)
        patch.setattr(instructions, "multiply", _multiply_stored)
        patch.setattr(totals, "store_sums", store_sums)
        own = stored_instructions
        patch.setattr(own, "over_keys", over_keys)
        patch.setattr(own, "times_rows", times_rows)
        stored = lambda x, place: place.__setitem__(..., x.T.astype(place.dtype))
        patch.setattr(own, "store_weights", stored)
        patch.setattr(
            own, "store_columns", lambda x, place: place.__setitem__(..., x[0])
        )
        patch.setattr(own, "combine", combine)
        patch.setattr(own, "store_queries", store_queries)
        patch.setattr(own, "meet_warpgroup", lambda: None)
        yield


@contextmanager
def simulated_rows_of_logits() -> Iterator[None]:
    """Within, that of sums of exponentials and gradients of rows of logits does."""
    with _replaced((hopper_rows,), pallas_gpu) as patch:
        _replace_rows(patch)
        patch.setattr(hopper_rows, "jax", stand_ins.Instead(jax, new_ref=np.array))
        yield


@contextmanager
def simulated_norms() -> Iterator[None]:
    """Within, those of norms of rows do."""
    norms = norms_kernel, norms_team, norms_tiles
    kernels = *norms, group_norm_kernel, quantized_rows
    with _replaced(kernels, pallas_gpu) as patch:
        _replace_rows(patch)
        _replace_tiles(patch)
        yield


@contextmanager
def simulated_activations() -> Iterator[None]:
    """Within, those of activations do; JAX computes their functions."""

    def applied(scalars: Any, tiles: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(jax.vmap(jaxpr_as_fun(scalars))(*tiles)[0])

    with _replaced((activations,), pallas_gpu) as patch:
        _replace_rows(patch)
        patch.setattr(activations, "applied", applied)
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
    every = lambda: machine.HERE.block.meet(range(len(machine.HERE.block.turns)))
    f32 = lambda shape: np.zeros(shape, np.float32)
    patch.setattr(pallas_gpu_rows, "row_sums", stand_ins.row_sums)
    patch.setattr(pallas_gpu_rows, "row_maxima", stand_ins.row_maxima)
    patch.setattr(pallas_gpu_rows, "zeros", f32)
    patch.setattr(pallas_gpu_rows, "store", stand_ins.write)
    patch.setattr(pallas_gpu_rows, "without_first", stand_ins.without_first)
    patch.setattr(pallas_gpu_rows, "wait_for_block", every)
    patch.setattr(pallas_gpu_rows, "loaded", lambda x: x.view().astype(np.float32))
    patch.setattr(pallas_gpu_rows, "loaded_as_is", lambda x: x.view().copy())
    patch.setattr(pallas_gpu_rows, "quotient", lambda x, y: x / np.float32(y))
    patch.setattr(pallas_gpu_rows, "nearest_whole", np.rint)
    patch.setattr(pallas_gpu_rows, "floor", np.floor)
    patch.setattr(pallas_gpu_rows, "square_root", np.sqrt)
    patch.setattr(pallas_gpu_rows, "store_floats", stand_ins.write_floats)
    patch.setattr(pallas_gpu_rows, "store_integers", stand_ins.write_integers)
    patch.setattr(pallas_gpu_rows, "store_number", stand_ins.write_number)
