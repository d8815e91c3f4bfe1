"""One way to write an operation, with what a matcher must read off it.

A spelling names its inputs by axis letters ("btnh": batch, query position, head, head
width). Its arrays, the operands of the operation and the float64 oracle all follow from
that line.
"""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {
    "attention": dict(b=2, t=24, s=40, n=6, k=3, g=2, h=8, e=10),
    "rms_norm": dict(b=2, t=5, n=3, d=16, h=4, w=6),
    "layer_norm": dict(b=2, t=5, n=3, d=16, h=4, w=6),
    "group_norm": dict(b=2, t=5, d=16, h=4, w=6),
    "gated_linear_unit": dict(b=2, t=5, k=8, f=12, n=3),
    "ragged_dot": dict(m=24, k=8, n=10, g=4, f=12, t=12),
    "linear_cross_entropy": dict(b=2, t=5, k=8, v=12),
    "cross_entropy": dict(b=2, t=5, k=8, v=12),
}

CANONICAL = {
    "attention": {
        "q": "btnh",
        "k": "bskh",
        "v": "bske",
        "bias": "bnts",
        "mask": "bnts",
        "dropout": "bnts",
        "q_segments": "bt",
        "kv_segments": "bs",
        "kv_lengths": "b",
        "offset": "b",
        "prefix": "b",
        "alibi": "n",
        "sinks": "n",
        "scale_factor": "",
        "out": "btne",
    },
    "rms_norm": {"x": "...d", "scale": "d", "epsilon": "", "out": "...d"},
    "layer_norm": {"x": "...d", "scale": "d", "bias": "d", "out": "...d"},
    "group_norm": {"x": "bmgcn", "scale": "gc", "bias": "gc", "out": "bmgcn"},
    "gated_linear_unit": {
        "x": "...k",
        "w_gate": "kf",
        "w_up": "kf",
        "b_gate": "f",
        "b_up": "f",
        "rows_gate": "...f",
        "rows_up": "...f",
        "out": "...f",
    },
    "ragged_dot": {"lhs": "mk", "rhs": "gkn", "group_sizes": "g", "out": "mn"},
    "linear_cross_entropy": {
        "x": "...k",
        "w": "kv",
        "bias": "v",
        "labels": "...",
        "out": "...",
    },
}

DEFAULTS = {
    "attention": dict(
        scale=1.0, window=(None, None), shift=0, softcap=None, empty_rows=None
    ),
    "rms_norm": dict(eps=0.0),
    "layer_norm": dict(eps=0.0),
    "group_norm": dict(eps=0.0),
    "gated_linear_unit": dict(
        activation="silu",
        beta=1.0,
        clip_gate=(None, None),
        clip_up=(None, None),
        up_shift=0.0,
    ),
    "ragged_dot": dict(mode="forward"),
    "linear_cross_entropy": dict(
        scale=1.0,
        soft_cap=0.0,
        label_smoothing=0.0,
        z_loss=0.0,
        outside="nan",
        of_log_probabilities=False,
    ),
}


class Draw:
    """Random arrays of one spelling, the same on every run and every machine."""

    def __init__(self, name: str, sizes: Mapping[str, int], empty: bool):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.sizes = dict(sizes)
        self.empty = empty

    def shape(self, dims: str) -> tuple[int, ...]:
        """The sizes of the letters; a digit stands for itself."""
        return tuple(int(c) if c.isdigit() else self.sizes[c] for c in dims)


@dataclass(frozen=True)
class Input:
    """One argument: its axis letters and how it is drawn."""

    dims: str
    make: Callable[[Draw, tuple[int, ...]], np.ndarray]


def floats(dims: str, around: float = 0.0, spread: float = 1.0) -> Input:
    """Normal float32 numbers."""
    return Input(
        dims,
        lambda draw, shape: (around + spread * draw.rng.standard_normal(shape)).astype(
            np.float32
        ),
    )


def positive(dims: str, low: float = 0.5, high: float = 1.5) -> Input:
    """Uniform float32 numbers between two bounds."""
    return Input(
        dims,
        lambda draw, shape: draw.rng.uniform(low, high, shape).astype(np.float32),
    )


def booleans(dims: str, share: float = 0.7, dtype: type = np.bool_) -> Input:
    """Random truth values; the last axis keeps its first entry true.

    With `Draw.empty` the rows of the second index along the last axis but one
    (the first one along `b` if there are no rows) are all false.
    """

    def make(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
        keep = draw.rng.random(shape) < share
        keep[..., 0] = True
        if draw.empty:
            row = (..., 1, slice(None)) if dims[-2] == "t" else (0,)
            keep[row] = False
        return keep.astype(dtype)

    return Input(dims, make)


def integers(dims: str, low: int, high: int) -> Input:
    """Uniform int32 numbers, both ends included."""
    return Input(
        dims,
        lambda draw, shape: draw.rng.integers(low, high + 1, shape, dtype=np.int32),
    )


def given(dims: str, make: Callable[[Draw], object]) -> Input:
    """An array made by hand."""
    return Input(dims, lambda draw, shape: np.asarray(make(draw)))


def key() -> Input:
    """A raw random key."""
    return given("2", lambda draw: np.array([7, 11], np.uint32))


@dataclass(frozen=True)
class Spelling:
    """A function, its arguments, and the site that must be found in it.

    Attributes:
        name: Family and name, "mask/tril".
        fn: The function as a user would write it.
        inputs: Argument name to `Input`, in the order of the arguments.
        op: Name of the operation.
        expect: Parameters to be read off, and under "operands" the names of
            the operands, in one string.
        count: How many sites there are; None if refusing is as good.
        masked_rows: What a row without any key gives ("nan", "mean", "zero");
            None if no row can be empty.
        also: Other parameters and operands that mean the same.
        bind: Arguments to operands, laid out as the operation wants them.
        read: Output of `fn` to the output of the operation.
        sizes: Sizes that differ from `SIZES`.
        gradients: Whether `fn` may be differentiated.
        spread: Tolerance of the forward check, relative to the largest output.
        assume: What must be assumed for the site to be rewritten.
    """

    name: str
    fn: Callable
    inputs: Mapping[str, Input]
    op: str
    expect: Mapping[str, object]
    count: int | None = 1
    masked_rows: str | None = None
    also: Sequence[Mapping[str, object]] = ()
    bind: Callable | None = None
    read: Callable | None = None
    out: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    gradients: bool = True
    spread: float = 2e-5
    assume: tuple[str, ...] = ()

    def args(self, dtype: object = jnp.float32, empty: bool = False) -> tuple:
        """Concrete arguments; floats in `dtype`, with rows to be masked if `empty`."""
        draw = Draw(self.name, {**SIZES[self.op], **self.sizes}, empty)
        arrays = [i.make(draw, draw.shape(i.dims)) for i in self.inputs.values()]
        return tuple(
            jnp.asarray(a, dtype if a.dtype == np.float32 else a.dtype) for a in arrays
        )

    @property
    def params(self) -> dict[str, object]:
        """The parameters alone."""
        found = {k: v for k, v in self.expect.items() if k != "operands"}
        if self.masked_rows is not None:
            found["empty_rows"] = self.masked_rows
        return found

    def operands(self, args: Sequence[object]) -> dict[str, np.ndarray]:
        """The operands that the site must have for these arguments, in float64."""
        canonical = CANONICAL[self.op]
        if self.bind is not None:
            found = self.bind(*args)
        else:
            found = {
                name: arrange(a, i.dims, canonical[name])
                for (name, i), a in zip(self.inputs.items(), args, strict=True)
            }
        return {name: wide(a) for name, a in found.items()}

    def output(self, result: object) -> np.ndarray:
        """The operation's output as found in what `fn` returned, in float64."""
        if self.read is not None:
            return wide(self.read(result))
        if self.out:
            return wide(arrange(result, self.out, CANONICAL[self.op]["out"]))
        return wide(result)

    def differences(
        self, params: Mapping[str, object], operands: Sequence[str]
    ) -> list[str]:
        """What a site lacks, against the nearest of the accepted readings."""
        readings = [self.expect, *self.also]
        return min((self._against(r, params, operands) for r in readings), key=len)

    def _against(self, reading, params, operands) -> list[str]:
        if rows := params.get("empty_rows"):  # what passes is the same number
            params = {**params, "empty_rows": str(rows).removesuffix("_passing")}
        wanted = _unshifted({**DEFAULTS[self.op], **reading})
        params = _unshifted({**DEFAULTS[self.op], **params})
        if self.masked_rows is None:
            wanted.pop("empty_rows", None)
        else:
            wanted["empty_rows"] = reading.get("empty_rows", self.masked_rows)
        names = set(str(wanted.pop("operands", "")).split())
        found = [
            f"{name} is {params.get(name, 'absent')}, expected {value}"
            for name, value in wanted.items()
            if not alike(params.get(name), value)
        ]
        if names and names != set(operands):
            found.append(
                f"operands are {' '.join(operands)}, expected {' '.join(sorted(names))}"
            )
        return found


def _unshifted(params: Mapping[str, object]) -> dict[str, object]:
    """A window around the shifted diagonal as a window around the diagonal."""
    found = dict(params)
    if "window" in found:
        left, right = found["window"]
        shift = found.pop("shift", 0)
        found["window"] = (
            None if left is None else left - shift,
            None if right is None else right + shift,
        )
    return found


def alike(found: object, expected: object) -> bool:
    """Equal, floats to three digits."""
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(expected, float) and isinstance(found, (float, int)):
        return abs(found - expected) <= 1e-3 * abs(expected) + 1e-9
    return found == expected


def wide(array: object) -> np.ndarray:
    """The array in float64, or unchanged if it holds no floats."""
    array = jnp.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return np.asarray(array.astype(jnp.float32)).astype(np.float64)
    return np.asarray(array)


def arrange(array: object, dims: str, target: str) -> jax.Array:
    """Transpose from the letters `dims` to the order `target`.

    Axes absent from `dims` get size one. `...` stands for all other letters,
    in their order; a head axis may be called `n` or `k`.
    """
    array = jnp.asarray(array)
    units = tuple(i for i, c in enumerate(dims) if c == "1")
    dims = dims.replace("1", "")
    array = array.reshape([n for i, n in enumerate(array.shape) if i not in units])
    target = target.replace("...", "".join(c for c in dims if c not in target[-1]))
    if "k" in target and "k" not in dims and "n" in dims and "n" not in target:
        dims = dims.replace("n", "k")
    assert set(dims) <= set(target), (dims, target)
    order = [dims.index(c) for c in target if c in dims]
    array = array.transpose(order)
    shape = iter(array.shape)
    return array.reshape([next(shape) if c in dims else 1 for c in target])


def collect(op: str) -> tuple[list[Spelling], Callable]:
    """A list of spellings and the decorator that adds to it."""
    spellings: list[Spelling] = []

    def spelling(
        name: str,
        *,
        inputs: Mapping[str, object],
        operands: str,
        count: int | None = 1,
        masked_rows: str | None = None,
        also: Sequence[Mapping[str, object]] = (),
        bind: Callable | None = None,
        read: Callable | None = None,
        out: str = "",
        sizes: Mapping[str, int] | None = None,
        gradients: bool = True,
        spread: float = 2e-5,
        assume: tuple[str, ...] = (),
        **params: object,
    ) -> Callable:
        def add(fn: Callable) -> Callable:
            assert all(s.name != name for s in spellings), name
            spellings.append(
                Spelling(
                    name=name,
                    fn=fn,
                    inputs={
                        k: floats(i) if isinstance(i, str) else i
                        for k, i in inputs.items()
                    },
                    op=op,
                    expect={**params, "operands": operands},
                    count=count,
                    masked_rows=masked_rows,
                    also=tuple(also),
                    bind=bind,
                    read=read,
                    out=out,
                    sizes=dict(sizes or {}),
                    gradients=gradients,
                    spread=spread,
                    assume=assume,
                )
            )
            return fn

        return add

    return spellings, spelling
