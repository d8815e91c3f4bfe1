"""Attention on TPUs: what it takes, which blocks it computes, its numbers, its code."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.kernels.attention import KERNELS, OP
from rewriter.kernels.attention import tpu as kernel
from rewriter.kernels.attention.reference import visible
from rewriter.kernels.attention.tpu import passes
from rewriter.kernels.attention.tpu.config import BackwardBlocks, Blocks
from rewriter.kernels.attention.tpu.schedule import (
    IDLE,
    LATER,
    MORE,
    PART,
    Cut,
    major,
    minor,
    states,
    steps,
)
from rewriter.kernels.attention.tpu.sizes import together
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.tpu import GENERATIONS
from tests import slow
from tests.kernels.attention import test_memory_bounded
from tests.kernels.attention.test_memory_bounded import (
    CASES,
    PLAIN,
    close,
    exact,
    lengths,
    make,
)
from tests.support.kernels import tpu

pytestmark = pytest.mark.once

CAUSAL, NONE = (None, 0), (None, None)
SMALL = Blocks(16, 128, 16, 128)
BACKWARD = {f: BackwardBlocks(128, 128, 128, 128, f) for f in (True, False)}


def spec(
    shape: tuple[int, ...] = (2, 256, 4, 64),
    dtype: str = "bfloat16",
    more: dict[str, tuple[tuple[int, ...], str]] | None = None,
    **params: Any,
) -> Spec:
    operands = {n: jax.ShapeDtypeStruct(shape, dtype) for n in "qkv"}
    for name, (of, kind) in (more or {}).items():
        operands[name] = jax.ShapeDtypeStruct(of, kind)
    return spec_of(OP, operands, params)


CACHE = dict.fromkeys("kv", ((4, 8192, 8, 128), "bfloat16"))


# ---------------------------------------------------------------- what it takes
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(dtype="float16"), "takes bfloat16 or float32, not float16"),
        (spec(out_dtype="float16"), "the result is float16"),
        (spec(more={"v": ((2, 256, 4, 64), "float32")}), "not bfloat16, float32"),
        (spec(more={"bias": ((1, 1, 256, 256), "float16")}), "bias is float16"),
        (spec(shape=(2, 0, 4, 64)), "an axis of size 0"),
        (spec(more={"dropout": ((1, 1, 256, 256), "float32")}, empty_rows="mean"), "the mean of dropped values"),
        (spec(shape=(1, 1 << 23, 1, 128), more={"kv_lengths": ((1,), "int32")}), "blocks of scores, more than 131072"),
        (spec(shape=(1, 256, 1, 16384)), "MiB of VMEM of 16 MiB"),
    ],
)  # fmt: skip
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = kernel.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize("kind", ["tpu", *(g.kind for g in GENERATIONS)])
@pytest.mark.parametrize(
    "given",
    [
        spec(),
        spec((1, 32768, 4, 128), window=CAUSAL),
        spec((1, 100, 3, 80), "float32"),
        spec((4, 2048, 4, 256), more={"bias": ((1, 4, 2048, 2048), "float32"), "mask": ((4, 1, 2048, 2048), "bool")}),
        spec((4, 1, 32, 128), more={"k": ((4, 4096, 8, 128), "bfloat16"), "v": ((4, 4096, 8, 128), "bfloat16"), "kv_lengths": ((4,), "int32")}),
    ],
)  # fmt: skip
def test_what_it_takes(given: Spec, kind: str) -> None:
    there = device.of(kind, "tpu")
    assert kernel.supports(given).ok, kernel.supports(given)
    mine = next(k for k in KERNELS if k.name == "mosaic_tpu")
    for space in (mine.space, mine.backward_space):
        assert space is not None
        found, _ = worth_measuring(space, given, there, 24)
        assert found[0] == space.default(given, there)
        assert all(space.fits(c, given, there).ok for c in found)


def test_larger_blocks_where_there_is_more_memory() -> None:
    given = spec((1, 8192, 4, 128), window=CAUSAL)
    v4, v5e = (device.named(n) for n in ("tpu_v4", "tpu_v5e"))
    wide = spec((1, 8192, 4, 256), "float32")
    assert kernel.default(wide, v4).rows < kernel.default(wide, v5e).rows
    assert kernel.backward_default(given, v5e).fused
    assert not kernel.backward_default(given, v4).fused


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec((1, 1024, 8, 128)), ""),
        (spec((1, 128, 8, 128)), "so little that XLA is as fast"),
        (spec((1, 1024, 8, 128), "float32"), "float32 at full precision"),
        (spec((4, 1, 8, 128), more=CACHE), "so little"),
        (spec((4, 1, 8, 128), more={**CACHE, "kv_lengths": ((4,), "int32")}), ""),
    ],
)  # fmt: skip
def test_where_it_pays(given: Spec, why: str) -> None:
    verdict = kernel.profitable(given, "tpu")
    assert verdict.ok == (not why)
    assert why in "".join(r.text for r in verdict.reasons)


def test_steps_are_those_of_blocks_that_are_seen() -> None:
    blocks, back = Blocks(1024, 1024, 1024, 512), BackwardBlocks(1024, 1024, 512, 512)
    full = spec((2, 8192, 3, 128))
    causal = spec((2, 8192, 3, 128), window=CAUSAL)
    assert kernel.steps(full, blocks, back, "")["attention"] == 6 * 64
    made = kernel.steps(causal, blocks, back, "")
    # Blocks at the diagonal run other code than those below: half of it each.
    assert made["attention"] == made["attention_backward_fused"] == 6 * 36 / 2
    decode = spec((4, 1, 32, 128), more=CACHE)
    assert kernel.steps(decode, Blocks(32, 4096, 32, 4096), None, "")["attention"] == 64


# ------------------------------------------------------------------- schedule
SCHEDULES: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "plain": ((40, 300), {}, {}),
    "even": ((64, 256), {}, {}),
    "causal": ((300, 300), {}, {"right": 0}),
    "window": ((300, 300), {}, {"left": 50, "right": 3, "shift": 7}),
    "far": ((300, 300), {}, {"left": 2**31 - 1, "right": 2**31 - 1}),
    "offset": ((40, 300), {"offset": lengths(0, 200, -90)}, {"right": 0}),
    "prefix": ((300, 300), {"prefix": lengths(130, 3)}, {"right": 0, "left": 20}),
    "lengths": ((40, 300), {"kv_lengths": lengths(0, 300, 128, 77)}, {}),
    "segments": ((300, 200), {"q_segments": np.sort(np.arange(600).reshape(2, 300) % 4), "kv_segments": np.sort(np.arange(400).reshape(2, 200) % 5)}, {}),
    "mask": ((100, 300), {"mask": np.random.default_rng(0).random((2, 3, 100, 300)) < 0.02}, {}),
    "mask of keys": ((100, 300), {"mask": np.arange(300)[None, None, None] > 170}, {"right": 0, "shift": 150}),
    "mask of queries": ((100, 300), {"mask": (np.arange(100) > 40)[None, None, :, None]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_blocks_that_no_query_sees_are_left_out(name: str, known: bool) -> None:
    (t, s), given, more = SCHEDULES[name]
    cut = Cut(t, s, 32, 64, edges=True, **more)
    window = (more.get("left"), more.get("right"))
    keep = visible(t, s, **given, window=window, shift=more.get("shift", 0))
    many, per = cut.blocks
    full = np.zeros((1, 1, t, s), bool) | (True if keep is None else np.asarray(keep))
    full = np.pad(full, ((0, 0), (0, 0), (0, many * 32 - t), (0, per * 64 - s)))
    full = full.reshape(*full.shape[:2], many, 32, per, 64)
    some, every = full.any((1, 3, 5)), full.all((1, 3, 5))
    arrays = given if known else {n: jnp.asarray(x) for n, x in given.items()}
    found = states(cut, arrays)
    assert isinstance(found, np.ndarray) == (known or not given)
    found = np.broadcast_to(found, some.shape)
    assert (found[some] > 0).all()
    np.testing.assert_array_equal(found == 2, every)
    if name not in ("segments", "window", "prefix"):  # those may be empty all the same
        np.testing.assert_array_equal(found > 0, some)
    for by_keys in (False, True):
        check_steps(found, by_keys)


def check_steps(table: Any, by_keys: bool) -> None:
    made = steps(table, by_keys)
    table = table.swapaxes(1, 2) if by_keys else table
    if made.per_line:
        assert (table == 2).all()
        words = [[made.at((), 0, np.int32(i)) for i in range(made.count)]]
        words = np.asarray(words)
    else:
        words = np.asarray(made.words).reshape(-1, made.most)
        assert int(made.count) <= made.most
    for of, row in zip(table, words, strict=False):
        row = row[: int(made.count)]
        work = row[(row & IDLE) == 0]
        places = [(int(major(w)), int(minor(w))) for w in work]
        assert places == sorted(set(places))
        want = {(int(i), int(j)) for i, j in np.argwhere(of > 0)}
        dummies = {(i, 0) for i in range(len(of)) if not (of[i] > 0).any()}
        assert set(places) == want | dummies
        lines = [i for i, _ in places]
        first = [i not in lines[:x] for x, i in enumerate(lines)]
        last = [i not in lines[x + 1 :] for x, i in enumerate(lines)]
        assert [w & LATER == 0 for w in work] == first
        assert [w & MORE == 0 for w in work] == last
        assert [w & PART == 0 for w in work] == [of[p] == 2 for p in places]
        idle = row[len(work) :]
        assert all(w >> 4 == work[-1] >> 4 for w in idle)  # nothing is fetched
        assert all(w & (LATER | MORE | PART) == LATER | MORE | PART for w in idle)


# -------------------------------------------------------------------- numbers
def run(
    arrays: dict[str, Any], params: dict[str, Any], up: Any, fused: bool
) -> tuple[Any, dict[str, Any]]:
    @jax.jit  # as one program: every operation alone takes longer to compile
    def both(arrays: dict[str, Any], up: Any) -> tuple[Any, dict[str, Any]]:
        given = {**arrays, **params}
        out, residuals = kernel.forward(**given, config=SMALL, residuals=True)
        grads = kernel.backward(
            **given, out=out, residuals=residuals, cotangent=up,
            config=BACKWARD[fused],
        )  # fmt: skip
        return out, grads

    return both(arrays, up)


LEFT = {"alibi", "dropout"}
"""Operands whose cotangents are taken from the reference."""


def check(case: str, dtype: str = "float32", fused: bool = True) -> None:
    shape, extra, params = CASES[case]
    arrays = {n: jnp.asarray(x) for n, x in make(shape, extra, dtype).items()}
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])}, dtype)["up"]
    want, want_grads = exact(arrays, up, params)
    out, grads = run(arrays, params, jnp.asarray(up), fused)
    assert out.dtype == dtype
    close(out, want, dtype, "out")
    assert want_grads.keys() - grads.keys() <= LEFT
    for name, got in grads.items():
        assert got.dtype == arrays[name].dtype
        close(got, want_grads[name], dtype, name)


QUICK = [
    "odd", "causal more rows mean", "gqa", "window both", "offset far", "prefix",
    "lengths 0 nan", "segments", "mask heads", "bias", "bias fill sinks",
    "sinks empty", "scale softcap", "one key",
]  # fmt: skip


@pytest.mark.parametrize("case", slow.first(5, QUICK))
def test_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "together", lambda spec: "")
    with tpu.interpreted():
        check(case, fused=QUICK.index(case) % 2 == 0)


@pytest.mark.parametrize(
    "case",
    slow.first(
        4,
        [
            "passing nan",
            "passing nan, zero",
            "passing bias heads",
            "passing softcap",
            "passing lengths",
        ],
    ),
)
def test_rows_without_keys_pass_gradients(case: str) -> None:
    with tpu.interpreted():
        check(case, fused=case not in ("passing lengths", "passing nan, zero"))


@pytest.mark.parametrize(
    ("case", "fused"),
    slow.first(
        2,
        [("mask of pairs", True), ("lengths", False), ("segments", True),
         ("window", True), ("prefix", False), ("sinks", True)],
        several=True,
    ),
)  # fmt: skip
def test_what_is_hidden_stays_hidden(
    case: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tested(arrays: Any, options: Any, up: Any) -> Any:
        out, grads = once(arrays, options, up)
        more = PLAIN(arrays, options, up)[1]  # those that the reference gives
        return out, {**more, **grads}

    once = jax.jit(lambda x, o, up: run(x, dict(o), up, fused), static_argnums=1)
    monkeypatch.setattr(test_memory_bounded, "RUN", tested)
    with tpu.interpreted():
        test_memory_bounded.check_hidden(case, "mean_passing" if fused else "nan")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("decode", "all"),
        ("alibi offset sinks", "all"),
        ("lengths 0", "all"),
        ("segments one", "all"),
        ("window shift", "all"),
        ("prefix one", "all"),
        ("sinks", "group"),
        ("mask", "group"),
    ],
)
def test_few_queries(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "together", lambda spec: kind)
    shape, extra, params = CASES[case]
    arrays = {n: jnp.asarray(x) for n, x in make(shape, extra).items()}
    want, _ = exact(arrays, np.zeros((*shape[:2], shape[3], shape[6])), params)
    with tpu.interpreted():
        run = jax.jit(lambda x: kernel.forward(**x, **params, config=SMALL))
        out = run(arrays)
    close(out, want, "float32", "out")


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_head(
    name: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the queries of all heads are rows of one block."""
    monkeypatch.setattr(passes, "together", lambda spec: "all")
    shape, extra, params = CASES["gqa"]
    arrays = {n: jnp.asarray(x) for n, x in make(shape, extra).items()}
    broken = {**arrays, name: arrays[name].at[0, 5, 0].set(bad)}
    with tpu.interpreted():
        run = jax.jit(lambda x: kernel.forward(**x, **params, config=SMALL))
        want, got = (np.asarray(run(x)) for x in (arrays, broken))
    (n, heads), there = (shape[3], shape[4]), np.isfinite(want)
    assert heads > 1
    there[0, :, : n // heads] = False
    np.testing.assert_array_equal(got[there], want[there])
    with np.errstate(all="ignore"):
        true, _ = exact(broken, np.zeros(want.shape), params)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(true))


def test_whose_queries_are_put_together() -> None:
    few = {"more": CACHE, "shape": (4, 1, 32, 128)}
    assert together(spec(**few)) == "all"
    assert together(spec((4, 4, 32, 128), more=CACHE)) == "all"
    assert together(spec((4, 8, 32, 128), more=CACHE)) == "group"
    assert together(spec((4, 64, 32, 128), more=CACHE)) == ""
    bias = {**CACHE, "bias": ((1, 32, 1, 8192), "bfloat16")}
    assert together(spec((4, 1, 32, 128), more=bias)) == "group"
    odd = dict.fromkeys("kv", ((4, 8192, 3, 128), "bfloat16"))
    assert together(spec((4, 1, 12, 128), more=odd)) == "group"


@tpu.needs_compiler
def test_a_cache_of_keys_is_read_as_it_lies() -> None:
    x = {"q": jax.ShapeDtypeStruct((4, 1, 32, 128), jnp.bfloat16)}
    x |= {n: jax.ShapeDtypeStruct(*CACHE[n]) for n in "kv"}
    there = device.named("tpu_v5e")
    run = lambda x: kernel.forward(
        **x, config=kernel.default(spec_of(OP, x, {}), there)
    )
    program = ahead_of_time.compiled(there, run, x)
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20  # 64 MiB a copy


@pytest.mark.parametrize(
    ("dtype", "fused"),
    slow.first(1, [("bfloat16", False), ("float32", True)], several=True),
)
def test_all_at_once(dtype: str, fused: bool) -> None:
    with tpu.interpreted():
        check("everything", dtype, fused)


@pytest.mark.parametrize(
    ("case", "cores"),
    slow.first(1, [("gqa", 1), ("odd", 2), ("bias keys", 2)], several=True),
)
def test_memory(case: str, cores: int, capfd: pytest.CaptureFixture[str]) -> None:
    with tpu.simulated(capfd, cores):
        check(case, fused=case != "odd")


# ----------------------------------------------------------------------- code
def program(case: Spec, there: device.Device) -> tuple[Any, Any]:
    """A forward with residuals and a backward by the rules of thumb, and its specs."""
    blocks = kernel.default(case, there), kernel.backward_default(case, there)
    params = dict(case.params)
    x = {n: jax.ShapeDtypeStruct(case.shape(n), case.dtype(n)) for n in case.operands}

    def both(operands: dict[str, Any]) -> Any:
        out, kept = kernel.forward(
            **operands, **params, config=blocks[0], residuals=True
        )
        return out, kernel.backward(
            **operands, **params, out=out, residuals=kept, cotangent=out,
            config=blocks[1],
        )  # fmt: skip

    return both, x


COMPILED = {
    "causal": spec((1, 2048, 2, 128), window=CAUSAL, scale=0.1),
    "all": spec(
        (2, 300, 4, 80), "float32", {"v": ((2, 300, 4, 64), "float32"), "bias": ((2, 4, 300, 300), "float32"), "mask": ((2, 1, 300, 300), "bool"), "kv_lengths": ((2,), "int32"), "sinks": ((4,), "float32"), "q_segments": ((2, 300), "int32"), "kv_segments": ((2, 300), "int32")},
        softcap=30.0, window=(100, 3), empty_rows="mean",
    ),
}  # fmt: skip


@tpu.needs_compiler
@pytest.mark.parametrize(("generation", "case"), tpu.each_generation([*COMPILED]))
def test_it_is_compiled_for_each_generation(generation: str, case: str) -> None:
    there = device.of(tpu.KINDS[generation].kind, "tpu")
    text = tpu.compiled(generation, *program(COMPILED[case], there))
    assert "attention" in text


# --------------------------------------------------------------------- engine
def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
    t, s = scores.shape[2:]
    keep = jnp.arange(s)[None] <= jnp.arange(t)[:, None]
    scores = jnp.where(keep, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def scanned(q: Any, k: Any, v: Any) -> Any:
    layer = lambda x, _: (attention(x, k, v), None)
    return jax.lax.scan(layer, q, None, length=3)[0]


def gradient(q: Any, k: Any, v: Any) -> Any:
    total = lambda *x: attention(*x).astype(jnp.float32).sum()
    return jax.grad(total, (0, 1, 2))(q, k, v)


def sharded(q: Any, k: Any, v: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    every = PartitionSpec("x")
    return jax.shard_map(gradient, mesh=mesh, in_specs=every, out_specs=every)(q, k, v)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (attention, ["attention"]),
        (sharded, ["attention", "attention_backward_fused"]),
        (scanned, ["attention"]),
        (gradient, ["attention", "attention_backward_fused"]),
        (jax.vmap(attention), ["attention"]),
    ],
)
def test_exported_programs_carry_it(function: Any, names: list[str]) -> None:
    """No TPU is described while it is lowered, as in the tests above one is."""
    plain = (attention, scanned, gradient, sharded)
    lead = () if function in plain else (2,)
    x = jax.ShapeDtypeStruct((*lead, 1, 2048, 4, 128), jnp.bfloat16)
    made = rewriter.export(
        function, platforms=("tpu",), targets={"tpu": "tpu_v5e"}, vjp_order=0
    )
    artifact = made(x, x, x)
    assert "tpu_custom_call" in artifact.manifest["custom_calls"]
    text = artifact.exported.mlir_module()
    for name in names:
        assert f'kernel_name = "{name}"' in text
