"""Functions of scores on Hopper: the kernels' code, simulated by threads, and lowered.

On a GPU every function of `tests.spellings.attention.scores` runs there (``-m gpu``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import SCORED, xla
from rewriter.kernels.attention.hopper import backward_kernel, forward_kernel
from rewriter.kernels.attention.hopper import scored as hopper_scored
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.functions import function_of
from rewriter.kernels.attention.hopper.hoisting import hoisted
from rewriter.kernels.attention.hopper.scored import KERNEL
from rewriter.kernels.attention.scored_form import OWN
from rewriter.ops.device import named
from rewriter.ops.kernel import spec_of
from rewriter.ops.score import Ref, Score, lookup_step, number, primitive_step
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    needs_hopper,
    operands,
)
from tests.slow import first
from tests.spellings.attention import scores
from tests.support.kernels import lines, simulator
from tests.support.kernels.float64 import float64

draw = np.random.default_rng(0)
B, T, S, N, HEADS, H = 2, 100, 140, 2, 1, 32

Function = Callable[..., Any]


def array(*shape: int, low: float = 0.5, high: float = 1.5) -> np.ndarray:
    """Returns floats between two numbers."""
    return draw.uniform(low, high, shape).astype(np.float32)


def score_of(
    main: Function, arrays: dict[str, np.ndarray], index: Function | None = None
) -> Score:
    """Returns a function of scores by its equations.

    Args:
        main: A function of scalars: the product, query, key, the arrays that are no
            tables, and the number found in ``table_0`` if there is an index.
        arrays: What it reads, by name.
        index: A function of query and key.
    """
    steps: list[Any] = []

    def traced(function: Function, given: list[tuple[Ref, Any]]) -> Ref:
        scalars = [jax.ShapeDtypeStruct((), dtype) for _, dtype in given]
        jaxpr = jax.make_jaxpr(function)(*scalars).jaxpr
        refs = dict(zip(jaxpr.invars, (ref for ref, _ in given), strict=True))
        read = lambda v: number(v.val, v.aval.dtype) if hasattr(v, "val") else refs[v]
        for eqn in jaxpr.eqns:
            ins = tuple(map(read, eqn.invars))
            dtype = eqn.outvars[0].aval.dtype
            steps.append(primitive_step(eqn.primitive, eqn.params, ins, dtype))
            refs[eqn.outvars[0]] = Ref("step", len(steps) - 1)
        return read(jaxpr.outvars[0])

    places = [(Ref("row"), "int32"), (Ref("column"), "int32")]
    given = [(Ref("product"), "float32"), *places]
    given += [
        (Ref("array", name), x.dtype)
        for name, x in arrays.items() if name.startswith("score")
    ]  # fmt: skip
    if index is not None:
        place = traced(index, places)
        steps.append(lookup_step(Ref("array", "table_0"), place, "float32", 0.25))
        given.append((Ref("step", len(steps) - 1), "float32"))
    out = traced(main, given)
    return Score(tuple(steps), out, "float32")


def every(x: Any, i: Any, j: Any, *read: Any) -> Any:
    """Reads an array of each form."""
    pairs, flags, rows, columns, heads, found = read
    away = jnp.abs(i - j).astype(jnp.float32)
    made = jnp.tanh(x * rows) * pairs.astype(jnp.float32) + columns * jnp.sin(x)
    return jax.lax.select(flags, made, -made) - heads * jnp.log1p(away) + found


CASES: dict[str, tuple[Function, dict[str, np.ndarray], Any, dict[str, Any]]] = {
    "bent": (
        lambda x, i, j: x * jnp.exp(-jnp.square(x)) + x, {}, None, {},
    ),
    "causal": (
        lambda x, i, j, r: x * jnp.exp(-r * jnp.abs(i - j).astype(jnp.float32)),
        {"score_0": array(1, N, 1, 1, low=0.0, high=0.1)}, None, {"window": CAUSAL},
    ),
    "cap, rows without keys": (
        lambda x, i, j, r: r * jnp.tanh(x / r),
        {"score_0": array(1, N, 1, 1)}, None,
        {"window": CAUSAL, "kv_lengths": np.array([0, 77])},
    ),
    "every form": (
        every,
        {
            "score_0": array(1, N, T, S).astype(jnp.bfloat16),
            "score_1": draw.random((B, 1, T, S)) < 0.5,
            "score_2": array(B, 1, T, 1), "score_3": array(B, N, 1, S),
            "score_4": array(1, N, 1, 1), "table_0": array(1, N, 30),
        },
        lambda i, j: j - i, {"window": (100, 60), "kv_lengths": np.array([140, 77])},
    ),
    "hidden in the function": (
        lambda x, i, j: jax.lax.select(j <= i + 5, x * x, jnp.float32(-1e9) + 0 * x),
        {}, None, {},
    ),
}  # fmt: skip
TILES = Tiles(64, 2, 2, 3)
BACKWARD = {
    "two kernels": BackwardTiles(64, 64, 2, 2, 3),
    "divided": BackwardTiles(64, 64, 2, 2, 2, divided=True),
    "fused": BackwardTiles(64, 64, 2, 2, 2, fused=True),
}


RUNS = [
    "every form | two kernels", "causal | two kernels", "every form | divided",
    "cap, rows without keys | two kernels", "cap, rows without keys | divided",
    "cap, rows without keys | fused",
    "every form | fused", "bent | two kernels", "hidden in the function | two kernels",
]  # fmt: skip


def use_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns operands, with a cotangent as ``up``, and parameters."""
    main, arrays, index, given = CASES[name]
    drawn = operands((B, T, S, N, HEADS, H, H), "bfloat16")
    named = dict(zip(("q", "k", "v", "up"), map(np.asarray, drawn), strict=True))
    params = {n: x for n, x in given.items() if n == "window"}
    named |= {n: x for n, x in given.items() if n != "window"} | arrays
    score = score_of(main, arrays, index)
    return named, params | {"score": score, "scale": H**-0.5}


def wanted(named: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Returns the result and gradients of q, k and v, with products in float64."""
    rest = {n: x for n, x in named.items() if n not in ("q", "k", "v", "up")}
    with float64():
        moving = {n: np.asarray(named[n], np.float64) for n in "qkv"}

        @jax.jit
        def both(moving: Any, up: Any) -> Any:
            of = lambda x: SCORED.reference(**x, **rest, **params)
            out, back = jax.vjp(of, moving)
            return {"out": out, **back(up)[0]}

        return both(moving, np.asarray(named["up"], np.float64))


@pytest.mark.once
@pytest.mark.parametrize("run", first(1, RUNS))
def test_its_code_run_by_threads(run: str) -> None:
    name, kind = run.split(" | ")
    named, params = use_of(name)
    want, up = wanted(named, params), named.pop("up")
    read = {n: named.pop(n) for n in OWN & named.keys()}
    apart = hoisted(params["score"], read, T, S)
    given = {**named, **params, "score": apart.score}
    given["read"] = {n: np.asarray(x) for n, x in apart.read(read, T, S).items()}
    with simulator.simulated():
        out, residuals = forward_kernel.forward(**given, residuals=True, config=TILES)
        got = backward_kernel.backward(
            **given, out=out, residuals=residuals, cotangent=up, config=BACKWARD[kind]
        )
    for which, x in {"out": out, **{n: got[n] for n in "qkv"}}.items():
        assert error(x, np.asarray(want[which])) <= 3 * LIMITS["bfloat16"], which


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_programs_compute_what_functions_do(name: str) -> None:
    """Line by line, against the function itself and its derivative."""
    named, params = use_of(name)
    read = {n: jnp.asarray(x) for n, x in named.items() if n in OWN}
    function = function_of(params["score"], read)
    assert function is not None
    assert function.supports().ok
    x = jnp.asarray(draw.normal(size=(B, N, T, S)), jnp.float32)
    i = jnp.broadcast_to(jnp.arange(T)[:, None], x.shape)
    j = jnp.broadcast_to(jnp.arange(S), x.shape)
    given = [x, i, j, *(jnp.broadcast_to(read[n], x.shape) for n in function.arrays)]
    for look in function.lookups:
        place, index = lines.evaluated(look.place, given)
        whole = jnp.broadcast_to(read[look.table][:, :, None], (B, N, T, 30))
        found = jnp.take_along_axis(whole, place, -1)
        given += lines.evaluated(look.found, [found, index])
    apply = lambda x: params["score"](x, i, j, read)
    value, slope = jax.jvp(apply, (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(lines.evaluated(function.value, given)[0], value)
    both = lines.evaluated(function.value_and_slope, given)
    np.testing.assert_allclose(both[0], value)
    np.testing.assert_allclose(both[1], slope, atol=1e-6)


@pytest.mark.once
def test_what_it_does_not_support() -> None:
    named, params = use_of("causal")
    named.pop("up")
    spec = spec_of(SCORED, named, params)
    assert KERNEL.supports(spec).ok

    def refused(main: Function, **changed: Any) -> str:
        score = score_of(main, {})
        verdict = KERNEL.supports(spec_of(SCORED, named, params | {"score": score}))
        assert not verdict.ok
        return " ".join(r.text for r in verdict.reasons)

    assert "lgamma" in refused(lambda x, i, j: jax.lax.lgamma(x))
    assert "remainders of floats" in refused(lambda x, i, j: jax.lax.rem(x, 2.0 * x))
    passing = spec.with_params({"empty_rows": "mean_passing"})
    assert not KERNEL.supports(passing).ok
    wide = {n: x.astype(np.float32) for n, x in named.items()}
    assert not KERNEL.supports(spec_of(SCORED, wide, params)).ok


@pytest.mark.once
def test_what_repeats_is_computed_before() -> None:
    """By distance, query, key and head; what remains reads it."""

    def main(x: Any, i: Any, j: Any, r: Any) -> Any:
        floats = lambda x: x.astype(jnp.float32)
        of_query, of_key = jnp.log(floats(i) + 2.0), jnp.sqrt(floats(j) + 1.0)
        far = jnp.exp(jnp.log1p(jnp.abs(floats(i - j))) * -jnp.tanh(r))
        return x * far + of_query * of_key

    arrays = {"score_0": array(1, N, 1, 1)}
    score = score_of(main, arrays)
    apart = hoisted(score, arrays, T, S)
    assert {part.kind for part in apart.parts} == {"distance", "rows", "columns"}
    assert apart.score.primitives <= {"sub", "add", "mul", "lookup", "copy"}
    read = apart.read(arrays, T, S)
    assert {n: x.shape for n, x in read.items()} == {
        "away_1": (1, N, T + S - 1), "score_of_rows_1": (1, 1, T, 1),
        "score_of_columns_1": (1, 1, 1, S),
    }  # fmt: skip
    x = draw.normal(size=(B, N, T, S)).astype(np.float32)
    i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
    got, want = apart.score(x, i, j, read), score(x, i, j, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    plain = score_of(lambda x, i, j: x + jnp.abs(i - j).astype(jnp.float32), {})
    assert not hoisted(plain, {}, T, S).parts  # it takes longer to read than to compute


@pytest.mark.once
@pytest.mark.parametrize(("width", "of_positions"), [(64, 128), (128, 64)])
def test_functions_of_positions_have_smaller_blocks(
    width: int, of_positions: int
) -> None:
    """Of dq, for wide heads: those of products alone need fewer registers."""
    heads = {"score_0": array(1, N, 1, 1)}
    q = {x: jax.ShapeDtypeStruct((B, 256, N, width), jnp.bfloat16) for x in "qkv"}

    def keys(main: Function) -> int:
        params = {"score": score_of(main, heads), "window": CAUSAL}
        spec = spec_of(SCORED, {**q, **heads}, params)
        return hopper_scored.backward_default(spec, named("h200")).keys

    assert keys(lambda x, i, j, r: r * jnp.tanh(x / r)) == 128
    away = lambda i, j: jnp.abs(i - j).astype(jnp.float32)
    assert keys(lambda x, i, j, r: x * jnp.exp(-r * away(i, j))) == of_positions


@pytest.mark.once
def test_many_tables_of_pairs_leave_no_room() -> None:
    names = [f"score_{k}" for k in range(8)]
    arrays = {n: array(1, N, T, S) for n in names}
    named, _ = use_of("causal")
    named = {n: x for n, x in named.items() if n in ("q", "k", "v")}

    def verdict(count: int) -> Any:
        some = dict(list(arrays.items())[:count])
        score = score_of(lambda x, i, j, *more: x + sum(more), some)
        return KERNEL.supports(spec_of(SCORED, {**named, **some}, {"score": score}))

    assert verdict(2).ok
    assert "shared memory" in " ".join(r.text for r in verdict(8).reasons)


@pytest.mark.once
def test_gradients_of_tables_are_those_of_all_scores() -> None:
    """As the plain kernel adds them up tile by tile."""
    named, params = use_of("every form")
    small = {
        n: jnp.asarray(x, jnp.float32) if n in ("q", "k", "v", "up") else x
        for n, x in named.items()
    }
    up, given = small.pop("up"), {**small, **params}
    out, residuals = xla.forward(**given, residuals=True)
    given |= {"out": out, "residuals": residuals, "cotangent": up}
    got, want = hopper_scored.of_tables(given), xla.backward(**given)
    assert got.keys() == {"table_0"}
    np.testing.assert_allclose(got["table_0"], want["table_0"], rtol=2e-3, atol=2e-3)
    wide = {n: jax.ShapeDtypeStruct((8, 1 << 16, 16, 64), jnp.float32) for n in "qk"}
    assert hopper_scored.of_tables({**given, **wide}) == {}


# ------------------------------------------------------------------------ programs
def frame(case: scores.Case, which: str) -> Function:
    """Returns attention in bfloat16, with scores and the softmax in float32."""
    function = case.one if which == "first" else case.other

    def attend(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        i = jnp.arange(scores.T)[None, None, :, None]
        j = jnp.arange(scores.S)[None, None, None, :]
        given = scores.Given("bnts", dict(zip(case.arrays, arrays, strict=True)))
        weights = jax.nn.softmax(function(x * 0.3, i, j, given), axis=-1)
        out = jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)
        return out

    return attend


@functools.cache
def narrow() -> tuple[np.ndarray, ...]:
    """Returns q, k, v and a cotangent for the spellings."""
    shape = (scores.B, scores.T, scores.S, scores.N, scores.N, 16, 16)
    return tuple(map(np.asarray, operands(shape, "bfloat16")))


def with_gradients(f: Function) -> Function:
    """Returns a function that gives the result, and gradients of q, k and v."""

    def both(q: Any, k: Any, v: Any, up: Any, *arrays: Any) -> Any:
        out, back = jax.vjp(lambda q, k, v: f(q, k, v, *arrays), q, k, v)
        return out, *back(up)

    return both


def arguments(case: scores.Case) -> list[Any]:
    """Returns the arguments of `with_gradients`."""
    return [*narrow(), *(scores.ARRAYS[n] for n in case.arrays)]


def forced(case: scores.Case, which: str) -> Function:
    """Returns a spelling whose site is computed by the Hopper kernel."""
    kernels = {"scored_attention": "hopper"}
    return with_gradients(rewriter.optimize(frame(case, which), implementation=kernels))


@pytest.mark.once
@pytest.mark.parametrize(
    "name", first(1, ["t5 buckets, capped", "temperature per query", "gelu", "fire"])
)
def test_programs_are_lowered_without_a_gpu(name: str) -> None:
    case = next(c for c in scores.CASES if c.name == name)
    exported = jax.export.export(jax.jit(forced(case, "first")), platforms=["cuda"])(
        *arguments(case)
    )
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") >= 3


CONTEXTS: dict[str, Function] = {
    "vmap": jax.vmap,
    "checkpoint": lambda f: with_gradients(jax.checkpoint(f)),
    "scan": lambda f: lambda q, *more: jax.lax.scan(
        lambda x, _: (f(x, *more), None), q, length=2
    )[0],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_it_is_lowered_in_contexts(context: str) -> None:
    case = next(c for c in scores.CASES if c.name == "kerple log")
    kernels = {"scored_attention": "hopper"}
    fast = rewriter.optimize(frame(case, "first"), implementation=kernels)
    f = CONTEXTS[context](fast)
    q, k, v, up, *arrays = arguments(case)
    given = [q, k, v, *([up] if context == "checkpoint" else []), *arrays]
    if context == "vmap":
        given = [np.stack([x, x]) for x in given]
    exported = jax.export.export(jax.jit(f), platforms=["cuda"])(*given)
    wanted = 4 if context == "checkpoint" else 1
    assert exported.mlir_module().count("mosaic_gpu_v2") >= wanted


SPELLINGS = [(case, which) for case in scores.CASES for which in ("first", "second")]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("part", range(16))
def test_each_function_on_a_gpu(part: int) -> None:
    """Against float64, as near as the program as written, or nearer."""
    chosen = [x for x in SPELLINGS[part::16] if found(*x)]
    assert len(chosen) >= len(SPELLINGS[part::16]) - 2
    for case, which in chosen:
        arrays = arguments(case)
        got = jax.jit(forced(case, which))(*arrays)
        usual = jax.jit(with_gradients(frame(case, which)))(*arrays)
        with float64():
            wide = [np.asarray(x, np.float64) for x in arrays]
            want = jax.jit(with_gradients(frame(case, which)))(*wide)
            want = [np.asarray(x) for x in want]
        for name, g, u, w in zip(("out", "q", "k", "v"), got, usual, want, strict=True):
            limit = max(2 * LIMITS["bfloat16"], 1.5 * error(u, w))
            assert error(g, w) <= limit, (case.name, which, name)


def found(case: scores.Case, which: str) -> bool:
    """Whether a spelling is a function of scores that the kernel computes."""
    kernels = {"scored_attention": ["hopper", "xla"]}
    f = rewriter.optimize(frame(case, which), implementation=kernels)
    arrays = arguments(case)
    sites = f.report(*arrays[:3], *arrays[4:]).sites
    return len(sites) == 1 and sites[0].kernel == "hopper"
