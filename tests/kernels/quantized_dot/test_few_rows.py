"""Quantized dots of few rows on Hopper: the numbers, the choice, the instructions."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.quantized_dot import OP, few_rows
from rewriter.kernels.quantized_dot.few_rows import KERNEL, registers
from rewriter.kernels.quantized_dot.few_rows.config import Tiles
from rewriter.kernels.quantized_dot.few_rows.kernel import alternating
from rewriter.ops import device
from rewriter.ops.cost import FOUR_BITS
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.quantized_dot.test_hopper import (
    MODES,
    NARROW,
    ONCE,
    SHIFTED,
    close,
    make,
    structs,
    wanted,
    with_zeros,
)
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

HERE = device.named("h100")
WHOLE = "int32 -8.0 float32 *scale bfloat16"
"""Steps through integers, to which floats of 8 bits are rounded."""


def spec(widen: str | None = ONCE, mode: str = "forward", **given: Any) -> Any:
    sizes = {"m": 16, "k": 256, "n": 256, **given}
    return spec_of(OP, structs(mode=mode, **sizes), {"widen": widen, "mode": mode})


# ----------------------------------------------------------------- what it takes
@pytest.mark.once
def test_supports() -> None:
    for stored in few_rows.TAKEN:
        assert few_rows.supports(spec(stored=stored)).ok
        assert few_rows.supports(spec(stored=stored, mode="transposed")).ok
    for groups in (1, 2, 4, 8, 16):
        assert few_rows.supports(spec(groups=groups)).ok
    for given, why in (
        (spec(m=65), "65 rows"),
        (spec(k=100), "k is 100"),
        (spec(n=192), "n is 192"),
        (spec(groups=64), "groups of 4 numbers"),
        (spec(k=192, mode="transposed", stored="int4"), "k is 192"),
        (spec("float32 *scale"), "does not compute the steps"),
        (spec("bfloat16 /scale"), "does not compute the steps"),
        (spec(WHOLE, stored="float8_e4m3fn"), "does not compute the steps"),
    ):
        verdict = few_rows.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.once
@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("m", [1, 40, 64])
@pytest.mark.parametrize("sizes", [(4096, 14336), (14336, 4096), (8192, 28672)])
def test_configs(m: int, sizes: tuple[int, int], stored: str) -> None:
    k, n = sizes
    shapes = (("x", (m, k)), ("w", (k, n)), ("w_scale", (1, n)))
    use = dataclasses.replace(spec(stored=stored), shapes=shapes)
    found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
    own = few_rows.default(use, HERE)
    assert own in found
    assert len(found) > 2
    assert n // own.block_n * own.splits <= 132
    for change in ({"block_n": 192}, {"depth": 96}, {"turns": 5}, {"splits": 9}):
        assert not few_rows.fits(dataclasses.replace(own, **change), use, HERE).ok


@pytest.mark.once
@pytest.mark.parametrize("m", [1, 64])
def test_it_is_chosen_for_few_rows(m: int) -> None:
    given = structs(m=m, k=4096, n=14336, scale="bfloat16")
    program = lambda x, w, w_scale: x @ (w.astype(x.dtype) * w_scale)
    (site,) = rewriter.explain(program, target="h100")(*given.values()).sites
    assert site.kernel == "hopper_few_rows"


DEFAULTS = [
    (1, "int8", "forward", (4096, 14336), Tiles(depth=256, by_warps=True)),
    (8, "float8_e4m3fn", "forward", (4096, 14336), Tiles(depth=256, by_warps=True)),
    (1, "int8", "forward", (1024, 14336), Tiles(by_warps=True)),
    (1, "int8", "forward", (8192, 28672), Tiles(256, by_warps=True)),
    (1, "int4", "forward", (8192, 28672), Tiles(256, 256, by_warps=True)),
    (1, "int4", "forward", (4096, 14336), Tiles(256, 256, splits=2, by_warps=True)),
    (16, "int8", "forward", (4096, 14336), Tiles(stages=8, turns=4, by_warps=True)),
    (16, "float8_e4m3fn", "forward", (4096, 14336), Tiles()),
    (16, "int8", "forward", (8192, 28672), Tiles(256)),
    (16, "int4", "forward", (4096, 14336), Tiles(256, stages=8, splits=2)),
    (1, "int8", "transposed", (4096, 14336), Tiles()),
    (64, "int8", "forward", (4096, 14336), Tiles()),
]


@pytest.mark.once
@pytest.mark.parametrize(("m", "stored", "mode", "sizes", "config"), DEFAULTS)
def test_defaults(
    m: int, stored: str, mode: str, sizes: tuple[int, int], config: Tiles
) -> None:
    k, n = sizes
    matrix = (n, k) if mode == "transposed" else sizes
    shapes = (("x", (m, k)), ("w", matrix), ("w_scale", (1, n)))
    use = dataclasses.replace(spec(stored=stored, mode=mode), shapes=shapes)
    assert few_rows.default(use, HERE) == config
    assert few_rows.fits(config, use, HERE).ok


# ------------------------------------------------------------------------ numbers
CONFIGS = [
    Tiles(), Tiles(depth=64, stages=3, turns=3), Tiles(splits=3, stages=2),
    Tiles(256, stages=3, turns=1, across=2), Tiles(256, 64, 4, 2, 2, splits=2),
    Tiles(256, stages=3, turns=3, by_warps=True), Tiles(splits=2, by_warps=True),
]  # fmt: skip
SIZES = [((3, 256, 256), 1), ((20, 512, 256), 16), ((64, 384, 512), 3)]
USES = [
    (case, config, widen, mode)
    for case in SIZES
    for config in CONFIGS
    for widen in (ONCE, NARROW)
    for mode in MODES
]


@pytest.mark.parametrize(
    ("case", "config", "widen", "mode"),
    slow.first(4, USES[::-7], several=True),
    ids=str,
)
def test_simulated(case: Any, config: Tiles, widen: str, mode: str) -> None:
    """The kernel's turns: a Python thread per warpgroup, one block after the other."""
    (m, k, n), groups = case
    given = make(m, k, n, groups, mode)
    params = {"widen": widen, "mode": mode, "sums": "float32"}
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **params, config=config)
    close(got, wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [1, 4])
def test_simulated_blocks_of_512_columns(groups: int, mode: str) -> None:
    """Scales of a block take two copies."""
    given = make(3, 512, 1024, groups, mode)
    config = Tiles(512, 128, 4, 2, 2, 2, by_warps=True)
    params = {"widen": ONCE, "mode": mode, "sums": "float32"}
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **params, config=config)
    close(got, wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("widen", SHIFTED)
def test_simulated_with_addends(widen: str) -> None:
    given = with_zeros(make(64, 128, 128, 2))
    given["x"] = np.eye(128, dtype="bfloat16")[:64]
    if "zero" not in widen:
        del given["w_zero"]
    params = {"widen": widen, "sums": "float32"}
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **params, config=Tiles(stages=2))
    np.testing.assert_array_equal(np.asarray(got, np.float64), wanted(given, **params))


BEHIND = [
    ("*scale", "float32"), ("*scale bfloat16", "float32"), ("*scale", None),
    ("float32 *scale bfloat16", None), ("*0.5 float32 *scale", "float32"),
    ("/scale", "float32"),
]  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("behind", "sums"), BEHIND, ids=str)
def test_simulated_with_scales_behind_the_product(
    behind: str, sums: str | None
) -> None:
    given = make(5, 256, 128)
    params = {"widen": "bfloat16", "behind": behind, "sums": sums}
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **params, config=Tiles(stages=2))
    arrays = {n: jnp.asarray(x) for n, x in given.items()}
    want = OP.reference(**arrays, **params)
    assert got.dtype == want.dtype
    close(got, np.asarray(want, np.float64), 2**-7 if want.dtype != "float32" else 1e-5)


# -------------------------------------------------------------------- instructions
class _Registers:
    """Executes the instructions that widen numbers, as PTX defines them."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def emit(
        self, text: str, given: Any, result: Any = None, effects: bool = False
    ) -> Any:
        del result, effects
        if "; or.b32" in text:
            return int(given[0]) << 12 | int(given[0])
        name, rest = re.match(r"(\S+)\s+\$0, (.*);", text.strip("{} \n")).groups()
        self.used.add(name)
        words = [
            given[int(x[1:]) - 1] if x.startswith("$") else int(x, 0)
            for x in rest.split(", ")
        ]
        return getattr(self, "_" + name.split(".")[0])(name, *words)

    def _prmt(self, name: str, low: int, high: int, order: int) -> int:
        del name
        both = (int(high) << 32 | int(low)).to_bytes(8, "little")
        picked = [both[order >> 4 * i & 7] for i in range(4)]
        return int.from_bytes(bytes(picked), "little")

    def _lop3(self, name: str, a: int, b: int, c: int, table: int) -> int:
        del name
        terms = [
            (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            for i in range(8)
            if table >> i & 1
        ]
        return functools.reduce(lambda x, y: x | y, terms, 0) & 0xFFFFFFFF

    def _shr(self, name: str, word: int, count: int) -> int:
        del name
        return word >> count

    def _shl(self, name: str, word: int, count: int) -> int:
        del name
        return word << count & 0xFFFFFFFF

    def _and(self, name: str, a: int, b: int) -> int:
        del name
        return a & b

    def _mov(self, name: str, word: Any) -> np.float32:
        del name
        return np.uint32(word).view(np.float32)

    def _cvt(self, name: str, high: np.float32, low: np.float32) -> int:
        dtype = "bfloat16" if "bf16" in name else "float16"
        return _joined([low, high], dtype)

    def _two(self, name: str, a: Any, b: Any) -> Any:
        verb = {"mul": np.multiply, "sub": np.subtract, "add": np.add}[name[:3]]
        if name.endswith("f32"):
            return verb(np.float32(a), np.float32(b))
        dtype = "bfloat16" if "bf16" in name else "float16"
        x, y = (np.uint32(v).reshape(1).view(jnp.dtype(dtype)) for v in (a, b))
        wide = verb(x.astype(np.float32), y.astype(np.float32))
        return _joined(wide, dtype)

    _mul = _sub = _add = _two

    def _fma(self, name: str, a: int, b: int, c: int) -> int:
        dtype = "bfloat16" if "bf16" in name else "float16"
        x, y, z = (
            np.uint32(v).reshape(1).view(jnp.dtype(dtype)).astype(np.float32)
            for v in (a, b, c)
        )
        return _joined(x * y + z, dtype)


def _joined(values: Any, dtype: str) -> int:
    pair = np.asarray(values, np.float32).astype(jnp.dtype(dtype))
    return int(pair.view(np.uint32)[0])


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["int8", "uint8", "int4", "uint4"])
def test_every_number_is_widened_exactly(
    stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _Registers()
    monkeypatch.setattr(registers, "emit", machine.emit)
    monkeypatch.setattr(registers, "constant", lambda x: x)
    signed, bits = not stored.startswith("u"), int(stored[-1])
    count = 1 << bits
    for first in range(count):
        low, high = first * (0x01010101 if bits == 8 else 0x11111111), 0x5A3C96E1
        for at in range(32 // bits):
            word = registers.numbers(stored, dtype, low, high, at)
            got = np.uint32(word).reshape(1).view(jnp.dtype(dtype)).astype(np.float32)
            other = high >> bits * at & (count - 1)
            want = [x - count * (signed and x >= count // 2) for x in (first, other)]
            assert got.tolist() == want
    assert "prmt.b32" in machine.used


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_floats_of_four_bits_are_widened_exactly(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _Registers()
    monkeypatch.setattr(registers, "emit", machine.emit)
    monkeypatch.setattr(registers, "constant", lambda x: x)
    stored = few_rows.FLOATS
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "float32")
    want = np.concatenate([sizes, -sizes])
    for first in range(16):
        low, high = first * 0x11111111, 0x7A3C96E1
        for at in range(8):
            word = registers.numbers(stored, dtype, low, high, at)
            got = np.uint32(word).reshape(1).view(jnp.dtype(dtype)).astype("f4")
            np.testing.assert_array_equal(got, want[[first, high >> 4 * at & 15]])
            assert np.signbit(got[0]) == (first >= 8)


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["int8", "uint8", "int4", "uint4"])
def test_words_meet_rows_in_their_order(
    stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores take the same numbers of a matrix and of rows as `alternating`."""
    machine = _Registers()
    monkeypatch.setattr(registers, "emit", machine.emit)
    monkeypatch.setattr(registers, "constant", lambda x: x)
    signed, bits = not stored.startswith("u"), int(stored[-1])
    count = 32 // bits
    numbers = np.random.default_rng(0).integers(0, 1 << bits, 4 * count)
    places = [int(sum(int(x) << bits * i for i, x in enumerate(numbers[j : j + count])))
              for j in range(0, 4 * count, count)]  # fmt: skip
    wide = numbers - (1 << bits) * (signed & (numbers >= 1 << bits - 1))
    ordered = np.asarray(alternating(jnp.asarray(wide), count))
    for part in range(count // 2):
        for t in range(4):
            pair = registers.alternate(stored, dtype, places[t], part)
            got = np.uint32(pair).reshape(1).view(jnp.dtype(dtype)).astype(np.float32)
            assert got.tolist() == ordered[8 * part + 2 * t :][:2].tolist()


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["int8", "uint8", "int4", "uint4"])
def test_neighbours_are_widened_exactly(
    stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers of a column of a transposed matrix."""
    machine = _Registers()
    monkeypatch.setattr(registers, "emit", machine.emit)
    monkeypatch.setattr(registers, "constant", lambda x: x)
    signed, bits = not stored.startswith("u"), int(stored[-1])
    count = 1 << bits
    for first in range(count):
        other = first * 7 % count
        word = registers.neighbours(stored, dtype, other << bits | first)
        got = np.uint32(word).reshape(1).view(jnp.dtype(dtype)).astype(np.float32)
        want = [x - count * (signed and x >= count // 2) for x in (first, other)]
        assert got.tolist() == want


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_steps_round_as_the_program_does(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers at once in 16 bits, and one by one in float32."""
    if kind == "wide" and dtype == "float16":
        pytest.skip("casts of float16 to float32 are instructions of several parts")
    monkeypatch.setattr(registers, "emit", _Registers().emit)
    monkeypatch.setattr(registers, "constant", lambda x: x)
    monkeypatch.setattr(registers, "f32", lambda: None)
    narrow = kind == "narrow"
    given = dtype if narrow else "float32"
    steps = registers.Steps(
        (("-", 1), ("round", dtype), ("*", 0)), (given, given), dtype
    )
    assert steps.narrow is narrow
    r = np.random.default_rng(0)
    for number in range(-128, 128, 3):
        scale, zero = r.uniform(1e-3, 3.0), r.uniform(-9.0, 9.0)
        values = [
            np.asarray(x, np.float32).astype(jnp.dtype(given)) for x in (scale, zero)
        ]
        twice = [_joined([x, x], dtype) if narrow else np.float32(x) for x in values]
        word = registers.widened(_joined([number, -number], dtype), steps, twice)
        got = np.uint32(word).reshape(1).view(jnp.dtype(dtype))
        for x, y in zip((number, -number), got, strict=True):
            shifted = (np.float32(x) - np.float32(values[1])).astype(jnp.dtype(dtype))
            want = (np.float32(shifted) * np.float32(values[0])).astype(
                jnp.dtype(dtype)
            )
            assert y == want


# -------------------------------------------------------------------- the lowering
LOWERED = [
    (Tiles(256, 64, 4, 1, 2, splits=2), "int4", NARROW, 8, "forward"),
    (Tiles(), "int8", "bfloat16 -zero *scale", 1, "transposed"),
    (Tiles(stages=3, turns=3), "float8_e4m3fn", ONCE, 2, "forward"),
    (Tiles(256), "int4", "float32 *scale bfloat16", 2, "transposed"),
    (Tiles(256), few_rows.FLOATS, ONCE, 8, "forward"),
    (Tiles(256, by_warps=True), "int4", NARROW, 8, "forward"),
]


@pytest.mark.parametrize(
    ("config", "stored", "widen", "groups", "mode"),
    slow.first(1, LOWERED, several=True),
    ids=str,
)
def test_lowers_on_a_cpu(
    config: Tiles, stored: str, widen: str, groups: int, mode: str
) -> None:
    given = structs(m=16, k=256, n=256, groups=groups, stored=stored, mode=mode)
    if "zero" in widen:
        given["w_zero"] = given["w_scale"]
    how = {"widen": widen, "mode": mode, "config": config}
    call = jax.jit(lambda x: KERNEL.forward(**x, **how))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1
    assert [x.shape for x in exported.out_avals] == [(16, 256)]


# ------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("stored", few_rows.TAKEN)
@pytest.mark.parametrize("widen", [ONCE, NARROW, "bfloat16", *SHIFTED])
@pytest.mark.parametrize("mode", MODES)
def test_numbers(mode: str, widen: str, stored: str, config: Tiles) -> None:
    for m, groups in ((1, 1), (16, 4), (37, 8), (64, 32))[mode == "transposed" :: 2]:
        given = stored_in(stored, m, 1024, 512, groups)
        if mode == "transposed":
            given["w"] = np.asarray(jnp.asarray(given["w"]).T)
        given = with_zeros(given) if "zero" in widen else given
        if "scale" not in widen:
            del given["w_scale"]
        params = {"widen": widen, "mode": mode, "sums": "float32"}
        use = spec_of(OP, given, params)
        if not (few_rows.supports(use).ok and few_rows.fits(config, use, HERE).ok):
            continue
        call = functools.partial(KERNEL.forward, **params, config=config)
        got = jax.jit(call)(**given)
        with jax.default_matmul_precision("highest"):
            close(got, wanted(given, **params), 1e-4)


def stored_in(stored: str, m: int, k: int, n: int, groups: int) -> dict[str, Any]:
    """Operands, with every number of the dtype."""
    given = make(m, k, n, groups)
    bits = 4 if stored in FOUR_BITS else 8
    if "int" in stored:
        first = 0 if stored.startswith("u") else -(1 << bits - 1)
        numbers = np.arange(k * n).reshape(k, n) * 7 % (1 << bits) + first
        given["w"] = np.asarray(jnp.asarray(numbers, stored))
    else:
        given["w"] = make(m, k, n, groups, stored=stored)["w"]
    return given


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("behind", "sums"), BEHIND, ids=str)
def test_scales_behind_the_product(behind: str, sums: str | None) -> None:
    given = make(16, 1024, 512)
    params = {"widen": "bfloat16", "behind": behind, "sums": sums}
    config = Tiles(splits=2)
    got = jax.jit(functools.partial(KERNEL.forward, **params, config=config))(**given)
    want = wanted(given, **params)
    close(got, want, 2**-7 if got.dtype != "float32" else 1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_are_the_same_each_time(config: Tiles) -> None:
    given = make(32, 4096, 1536, 32)
    call = jax.jit(functools.partial(KERNEL.forward, widen=ONCE, config=config))
    first = np.asarray(call(**given))
    close(first, wanted(given, widen=ONCE), 2**-6)
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(call(**given)))


@pytest.mark.gpu
@on_hopper
def test_a_whole_program() -> None:
    """The kernel in a program, and the gradient of rows and scales."""
    given = make(16, 4096, 14336, 1, scale="bfloat16")

    def written(x: Any, w: Any, scale: Any) -> Any:
        return x @ (w.astype(x.dtype) * scale)

    fast = rewriter.optimize(written)
    (site,) = fast.report(*given.values()).sites
    assert site.kernel == "hopper_few_rows"
    close(fast(*given.values()), wanted(given, widen=NARROW), 2**-6)
    total = lambda f: lambda x, w, s: f(x, w, s).astype("float32").sum()
    got, want = (
        jax.jit(jax.grad(total(f), (0, 2)))(*given.values()) for f in (fast, written)
    )
    for a, b in zip(got, want, strict=True):
        close(a, np.asarray(b, np.float64), 2**-6)
