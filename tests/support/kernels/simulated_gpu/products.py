"""Products of tensor cores, computed when they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.kernels.simulated_gpu import machine


class Accumulator:
    def __init__(self, kind: Any):
        self.value = np.zeros(kind.shape, kind.dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        assert index is ...
        return result(self, 0)

    def __setitem__(self, index: Any, value: np.ndarray) -> None:
        assert index is ...
        self.value = np.array(value, self.value.dtype)


def wait_for_products(left: int) -> None:
    while len(machine.HERE.products) > left:
        machine.HERE.products.pop(0)()


def result(accumulator: Accumulator, wait_n: int = 0) -> np.ndarray:
    wait_for_products(wait_n)
    return accumulator.value.copy()


def add_product_of_rows(
    total: np.ndarray, left: machine.Reference, right: machine.Reference
) -> np.ndarray:
    """Adds to `total` itself, when it is waited for."""

    def run() -> None:
        a, b = (np.concatenate(list(x.view()), 1) for x in (left, right))
        total[...] += a.astype(np.float32).T @ b.astype(np.float32)

    machine.HERE.products.append(run)
    return total


def add_product(
    total: np.ndarray, left: machine.Reference, right: machine.Reference
) -> np.ndarray:
    """Adds to `total` itself, when it is waited for."""

    def run() -> None:
        a, b = left.view(), np.concatenate(list(right.view()), 1)
        total[...] += a.astype(np.float32) @ b.astype(np.float32)

    machine.HERE.products.append(run)
    return total


def add_product_of_panels(
    total: np.ndarray, left: Any, right: machine.Reference, turned: bool, begins: bool
) -> np.ndarray:
    """Returns a new total, which is computed when it is waited for."""
    del begins
    made = np.full(np.shape(total), np.nan, np.float32)

    def run() -> None:
        a = left.view() if isinstance(left, machine.Reference) else left
        a, b = a.T if turned else a, np.concatenate(list(right.view()), 1)
        made[...] = total + a.astype(np.float32) @ b.astype(np.float32)

    machine.HERE.products.append(run)
    return made


def claim(counter: machine.Reference, cell: machine.Reference) -> None:
    last = (0,) * (len(counter.shape) - 1) + (-1,)
    with machine.COUNTED:
        cell[0] = counter[last]
        counter[last] += 1


def widened(
    narrow: machine.Reference,
    wide: machine.Reference,
    steps: Sequence[tuple[str, Any]] = (),
    joined: Sequence[machine.Reference] = (),
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


def row_of(
    reference: machine.Reference, first: int, shape: tuple[int, int]
) -> np.ndarray:
    first = min(first, reference.shape[0] - shape[1])
    return np.broadcast_to(reference.view()[first : first + shape[1]], shape)


def column_of(
    reference: machine.Reference, first: int, shape: tuple[int, int]
) -> np.ndarray:
    assert first % shape[0] == 0
    assert first + shape[0] <= reference.shape[0], "no such rows"
    return np.broadcast_to(reference.view()[first : first + shape[0], None], shape)


def multiply(accumulator: Accumulator, a: Any, b: machine.Reference) -> None:
    def run() -> None:
        left = a.view() if isinstance(a, machine.Reference) else a
        dtype = accumulator.value.dtype
        product = left.astype(dtype) @ b.view().astype(dtype)
        accumulator.value = accumulator.value + product

    machine.HERE.products.append(run)


def scoped(body: Callable[..., Any], *kinds: Any) -> Any:
    return body(*(Accumulator(kind) for kind in kinds))
