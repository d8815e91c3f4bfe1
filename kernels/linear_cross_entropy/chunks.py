"""Loops over chunks of rows and classes, and the number of logits held at once.

Logits are an array of rows and classes. A block has some of the rows. A chunk has some
of the classes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import min_dim

from rewriter.kernels.shared.loops import fori_loop
from rewriter.kernels.shared.row_blocks import Rows
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec


@dataclass(frozen=True)
class Chunk:
    """The config of both passes.

    Attributes:
        budget: The most bytes of logits that are held at once. Chunks have at least
            `least` classes, and blocks at least as many rows, whatever the budget.
        least: The fewest classes of a chunk, and the fewest rows of a block.
        whole: Whether blocks of rows have all classes where the budget allows it.
            Weights are then never cut. Their gradients are added up over blocks.
        aligned: Classes are padded to a multiple of this, unless they are one of 16.
        rounded: Whether logits are held as the program rounds them, in the dtype of its
            product. Otherwise they are held in float32 or float64.
        beside: Where losses and gradients are computed at once, logits may be held in
            place of the weights' gradient, and these of so many more rows beside it. If
            None, they are held for blocks of rows.
        passing: The most bytes of logits where nothing holds them: in a forward alone,
            or where all are held in place of the weights' gradient. 0 for the budget.
        one_kernel: Whether one kernel of a GPU puts the weights' gradient in its place.
            Otherwise a product is copied there for each chunk of classes.
    """

    budget: int = 1 << 24
    least: int = 64
    whole: bool = False
    aligned: int = 1
    rounded: bool = False
    beside: int | None = None
    passing: int = 0
    one_kernel: bool = False

    @property
    def of_passing(self) -> Chunk:
        """The config for logits that nothing holds."""
        if not self.passing:
            return self
        return replace(self, budget=self.passing, least=max(self.least, NARROW))


NARROW = 256
"""The fewest classes of a chunk whose logits nothing holds."""

DEFAULT = Chunk(passing=1 << 20)
"""For CPUs. Chunks that stay in the cache are faster. Forwards took 0.56 to 0.75 of
XLA's time with 1 MiB, and 0.67 to 0.96 with 16 MiB."""
LARGE = Chunk(1 << 29, 1024, whole=True, aligned=128, rounded=True)
"""For GPUs and TPUs, which need large products of aligned sizes."""

ROWS = 2048
"""The rows that a block of `LARGE` has at least, if the device's memory allows it. Its
products then take longer than adding up gradients of the weights."""

SHARE = 32
"""The part of a device's memory that logits of a block may take for that."""

TOO_MUCH = 16
"""The part of a device's memory that gradients of the weights may take in float32, in
which they are added up over blocks."""

EVEN = 16
"""The sizes that products take without loss are multiples of this. XLA copies 16-bit
arrays whose rows are an odd multiple of 8 before it multiplies them: 2048 x 256008
took 0.94 ms for each block on an H200."""

COLUMNS = 8
"""The chunks of the gradients of a block whose logits are held, if not `whole`."""


CHUNK = 1 << 25
"""Bytes of the cotangents of a chunk's logits, of all rows, where logits are held in
place of the weights' gradient."""

TILE = 128
"""The classes of such a chunk are a multiple of this, the size of a product's tile."""


TWICE = 16
"""The part of the rows whose logits may be computed twice to save memory."""

WORKSPACE = 32 << 20
"""Bytes that XLA's products take for themselves on a Hopper GPU."""

OF_A_ROW = 640
"""Bytes of a row's numbers, of which the kernel for sums writes 128 in float32."""


def default(spec: Spec, device: Device) -> Chunk:
    """Returns the chunk for a CPU, or a larger one."""
    if device.platform == "cpu":
        if not spec.symbolic and _are_few(spec):
            return replace(DEFAULT, beside=0)
        few = not spec.symbolic and _adds_up_often(spec)
        return replace(DEFAULT, budget=2 * DEFAULT.budget) if few else DEFAULT
    if spec.symbolic:
        return LARGE
    wanted = ROWS * spec.shape("w")[-1] * item_of(spec)
    room = device.memory // SHARE or LARGE.budget
    budget = max(LARGE.budget, min(wanted, room))
    made = replace(LARGE, budget=budget)
    added = 4 * math.prod(spec.shape("w"))
    if device.memory and added > device.memory // TOO_MUCH and may_be_in_place(spec):
        return least_memory(spec, made)
    return made


def _are_few(spec: Spec) -> bool:
    """Whether the gradient of the weights has room for the logits of all rows.

    The gradient is then written once. 512 rows of 1024 and 32000 classes took 1.05 of
    XLA's time in blocks of 131 rows, for whose sums there is no time.
    """
    count, k = math.prod(spec.shape("x")[:-1]), spec.shape("x")[-1]
    dtypes = {str(spec.dtype(n)) for n in ("x", "w")}
    plain = spec.param("logits_dtype") in (None, *dtypes)
    return count <= k and plain and dtypes in ({"float32"}, {"float64"})


def _adds_up_often(spec: Spec) -> bool:
    """Whether a block has so few rows that adding up gradients of weights counts.

    512 rows of 1024 and 32000 classes took 1.09 of XLA's time in blocks of 131 rows.
    """
    k, v = spec.shape("w")
    return DEFAULT.budget // (4 * max(v, 1)) < k // 4


def in_place_of_sums(spec: Spec, config: Chunk) -> Chunk | None:
    """Returns `least_memory` where that saves much, and little time is lost.

    Gradients of the weights, added up in float32, would take more than an eighth of
    XLA's memory. Few rows have no place for their logits, and are computed twice.
    """
    count, k = math.prod(spec.shape("x")[:-1]), spec.shape("x")[-1]
    if config.beside is not None or 4 * k <= count or not may_be_in_place(spec):
        return None
    made = least_memory(spec, config)
    again = count - k - (made.beside or 0)
    return made if again <= count // TWICE else None


def may_be_in_place(spec: Spec) -> bool:
    """Whether the gradient of the weights has room for some rows of logits."""
    (*rows, k), v = spec.shape("x"), spec.shape("w")[1]
    alike = jnp.dtype(spec.dtype("w")).itemsize == item_of(spec)
    return v % EVEN == 0 and math.prod(rows) >= k and alike


def least_memory(spec: Spec, config: Chunk) -> Chunk:
    """Returns a config with logits in place of the gradient of the weights.

    As many rows are held beside it as an eighth of XLA's memory allows. XLA holds
    logits twice in 16 bits and once in 32: 8 bytes each. Of an eighth, what is needed
    in passing takes a part: the cotangents of the first rows before they are put in
    their place, and later those of a chunk's logits and its weights' gradient. A kernel
    that puts the latter in its place needs neither of these.
    """
    (*rows, k), v, item = spec.shape("x"), spec.shape("w")[1], item_of(spec)
    count = math.prod(rows)
    chunk = of_cotangents(count, v, item, config) * (count + k) * item
    chunk = CHUNK - WORKSPACE if config.one_kernel else chunk
    in_passing = max(item * k * k, chunk) + WORKSPACE + OF_A_ROW * count
    beside = (count * v - in_passing) // (item * v)
    beside = beside // (TILE // 2) * (TILE // 2)
    return replace(config, beside=max(0, min(beside, count - k)))


def of_an_eighth(spec: Spec, config: Chunk, device: Device) -> Chunk:
    """Returns a config with larger blocks, if cotangents take the place of logits.

    Twice the rows then take as much memory as before. Still larger ones take an eighth
    of XLA's memory at most, with the sums of the weights' gradients beside them. These
    are then added up less often. Other passes keep their blocks.
    """
    (*rows, k), v, item = spec.shape("x"), spec.shape("w")[1], item_of(spec)
    count, wide = math.prod(rows), padded(v, config)
    most = count * v - 4 * k * wide - WORKSPACE - OF_A_ROW * count
    most = min(most, 2 * device.memory // SHARE)
    fewest = -(-count * item * wide // max(most, 2 * config.budget))
    parts = (n for n in range(fewest, 2 * fewest) if count % n == 0)
    of_all = count // next(parts, fewest) * item * wide
    larger = max(of_all, 2 * config.budget)
    return replace(config, budget=larger, passing=config.passing or config.budget)


ROWS_OF_WAITING = 8192
"""The most rows of weights, so that all tiles of a column are computed at once."""


def may_be_one_kernel(spec: Spec) -> bool:
    """Whether one kernel may put the gradient of the weights in its place."""
    (*rows, k), v = spec.shape("x"), spec.shape("w")[1]
    dtypes = {jnp.dtype(spec.dtype(n)).name for n in ("x", "w")}
    sizes = k % TILE == v % (TILE // 2) == math.prod(rows) % (TILE // 2) == 0
    plain = dtypes in ({"bfloat16"}, {"float16"}) and item_of(spec) == 2
    return sizes and plain and k <= ROWS_OF_WAITING and may_be_in_place(spec)


def configs(spec: Spec, device: Device) -> list[Chunk]:
    """Returns budgets worth measuring, of fewer bytes than all logits have."""
    if device.platform == "cpu":
        budgets = [1 << s for s in (22, 26, 28)]
        return [Chunk(b) for b in budgets if b < nbytes(spec)]
    size = nbytes(spec) // 4 * item_of(spec)
    large = (LARGE.least, True, LARGE.aligned, LARGE.rounded)
    small = (LARGE.least, False, LARGE.aligned, LARGE.rounded)
    found = [Chunk(1 << s, *large) for s in (28, 30, 31) if 1 << s < 2 * size]
    return found + [Chunk(1 << s, *small) for s in (26, 28) if 1 << s < size]


def nbytes(spec: Spec) -> int:
    """Bytes of all logits in float32."""
    return math.prod(spec.shape("x")[:-1]) * spec.shape("w")[-1] * 4


def item_of(spec: Spec) -> int:
    """Bytes of a logit as the program rounds it."""
    narrow = spec.param("logits_dtype") or jnp.result_type(
        spec.dtype("x"), spec.dtype("w")
    )
    return jnp.dtype(narrow).itemsize


def padded(classes: int, config: Chunk) -> int:
    """The number of classes with those that are added, so that products are aligned."""
    if classes % EVEN == 0 or config.aligned <= 1:
        return classes
    return -(-classes // config.aligned) * config.aligned


def whole_rows(count: int, classes: int, itemsize: int, config: Chunk) -> int:
    """Rows of a block with all classes; 0 if the budget is too small for them."""
    most = config.budget // itemsize // max(classes, 1)
    few = most < config.least
    if few and (not isinstance(count, int) or most < count):
        return 0
    return equal(count, max(most, 1))


def cut(count: int, classes: int, itemsize: int, config: Chunk) -> tuple[int, int]:
    """Rows of a block and classes of a chunk, equal ones where possible."""
    least = config.least
    numbers = max(config.budget // itemsize, 1)
    most = max(numbers // least, least)
    if not isinstance(count, int):
        most = min(most, ROWS)  # not one chunk of few classes for rows that may be few
    rows = equal(count, most)
    held = max(rows, 1) if isinstance(rows, int) else most
    return rows, equal(classes, max(numbers // held, least))


def equal(n: int, most: int) -> int:
    """The size of the fewest equal parts of at most some size, a multiple of 16.

    That of a symbolic number is symbolic too: `most`, or all if they are fewer.

    Example:
        >>> equal(10, 16), equal(8184, 5336), equal(100, 50)
        (10, 4096, 50)
    """
    if not isinstance(n, int):
        return min_dim(n, most)
    if n <= most:
        return n
    size = -(-n // -(-n // most))
    return min(-(-size // EVEN) * EVEN, most)


def classes_held(classes: int, config: Chunk) -> int:
    """Classes of a chunk of logits that are held, to form gradients of."""
    return equal(classes, max(classes // COLUMNS, config.least))


def of_cotangents(count: int, classes: int, itemsize: int, config: Chunk) -> int:
    """Classes of a chunk whose cotangents of all rows are held, beside all logits."""
    most = min(config.budget, CHUNK) // itemsize // max(count, 1)
    most = most // TILE * TILE or most
    return min(max(most, config.least), classes)


def flat(x: jax.Array, labels: jax.Array, **more: jax.Array) -> Rows:
    """The arrays, with one axis of rows in place of all but the last axis of x."""
    count = math.prod(x.shape[:-1])
    own, lead = more | {"labels": labels}, x.ndim - 1
    made = {n: a.reshape(count, *a.shape[lead:]) for n, a in own.items()}
    return made | {"x": x.reshape(count, x.shape[-1])}


def over_chunks(
    step: Callable[[Any, int, Any], Any], carry: Any, classes: int, size: int
) -> Any:
    """Runs ``step(start, size, carry)`` over chunks of classes and a rest."""
    whole = classes // size if size else 0
    if whole > 1:
        carry = fori_loop(0, whole, lambda i, c: step(i * size, size, c), carry)
    elif whole:
        carry = step(0, size, carry)
    rest = classes - whole * size
    return step(whole * size, rest, carry) if rest else carry
