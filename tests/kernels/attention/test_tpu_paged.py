"""Paged attention on TPUs, without one: its steps, numbers, memory, and its code."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.kernels.attention import PAGED as OP
from rewriter.kernels.attention import tpu_pages as tpu
from rewriter.kernels.attention.pages import AXES
from rewriter.kernels.attention.tpu_pages import schedule
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.attention.test_memory_bounded import close
from tests.kernels.attention.test_memory_bounded import exact as attention
from tests.support.kernels import tpu as on_tpu

pytestmark = pytest.mark.once

KERNELS = registry().kernels(OP.name)
KERNEL = tpu.KERNEL
PARAMS = ("scale", "window", "shift", "softcap", "empty_rows", "out_dtype")


# ------------------------------------------------------------------------- steps
@pytest.mark.parametrize("pages", slow.first(2, [1, 3, 2, 5]))
def test_pages_that_are_not_seen_are_neither_fetched_nor_given_a_step(
    pages: int,
) -> None:
    first, last = [0, 2, 4, 0, 3], [4, 3, 4, 0, 4]
    table = np.random.default_rng(0).permutation(25).reshape(5, 5).astype("int32")
    made = schedule.steps(*map(jnp.array, (table, first, last)), pages)
    chunks = -(-5 // pages)
    wanted = [
        (row, chunk)
        for row in range(5)
        for chunk in range(first[row] // pages, last[row] // pages + 1)
    ]
    words = made.words[: int(made.count)].tolist()
    assert [divmod(w, chunks) for w in words] == wanted
    assert made.begin.tolist() == [x // pages for x in first]
    assert made.end.tolist() == [x // pages for x in last]
    there, fetched = [-1] * pages, []
    read = np.asarray(made.pages).reshape(5 * chunks, pages)
    for step, (row, chunk) in enumerate(wanted):
        for i in range(pages):
            place = chunk * pages + i
            if first[row] <= place <= last[row]:
                assert read[step, i] == table[row, place]
            if read[step, i] != there[i]:
                there[i] = int(read[step, i])
                fetched.append(there[i])
    seen = [x for r in range(5) for x in table[r, first[r] : last[r] + 1].tolist()]
    assert set(fetched) == set(seen)
    assert len(fetched) < len(seen) + pages  # places are filled once, at the start


def test_which_pages_are_seen() -> None:
    def found(
        window: Any, lengths: Any = None, offset: Any = None, every: bool = False
    ):
        made = schedule.seen(4, 2, 32, lengths, offset, window, 1, every)
        return list(zip(made.first.tolist(), made.last.tolist(), strict=True))

    lengths, offset = jnp.array([0, 5, 32, 99]), jnp.array([-9, 0, 10, 40])
    assert found((None, None)) == [(0, 31)] * 4
    assert found((None, None), lengths) == [(0, 0), (0, 4), (0, 31), (0, 31)]
    assert found((None, None), lengths, every=True)[0] == (0, 31)
    assert found((None, 0), None, offset) == [(0, 0), (0, 2), (0, 12), (0, 31)]
    assert found((4, 0), None, offset) == [(0, 0), (0, 2), (7, 12), (0, 0)]
    assert found((4, 0), lengths, offset) == [(0, 0), (0, 2), (7, 12), (0, 0)]
    assert found((20, None), None, offset) == [(0, 31), (0, 31), (0, 31), (21, 31)]


# --------------------------------------------------------------- what it takes
def spec(
    b: int = 8, t: int = 1, n: int = 32, k: int = 8, h: int = 128, e: int = 0,
    size: int = 16, p: int = 64, heads_axis: int = 2, dtype: str = "bfloat16",
    more: dict[str, tuple[tuple[int, ...], str]] | None = None, **params: Any,
) -> Spec:  # fmt: skip
    sizes = {"p": 4096, "z": size, "k": k}
    pools = [
        [{**sizes, "h": width}[x] for x in AXES[heads_axis]] for width in (h, e or h)
    ]
    shapes = {
        "q": ((b, t, n, h), dtype), "k_pages": (pools[0], dtype),
        "v_pages": (pools[1], dtype), "table": ((b, p), "int32"),
        "kv_lengths": ((b,), "int32"), **(more or {}),
    }  # fmt: skip
    given = {n: jax.ShapeDtypeStruct(*x) for n, x in shapes.items()}
    return spec_of(OP, given, {"heads_axis": heads_axis, **params})


MASK = {"mask": ((8, 1, 1, 1024), "bool")}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(dtype="float16"), "takes bfloat16 or float32, not float16"),
        (spec(out_dtype="float16"), "not float16"),
        (spec(more=MASK), "masks by lengths, not by mask"),
        (spec(t=16), "512 queries of a sequence, more than 256"),
        (spec(size=12), "pages of 12 keys, not a multiple of 8"),
        (spec(b=0), "an axis of size 0"),
        (spec(b=4096), "KiB of SMEM"),
        (spec(k=32, size=128, h=512, dtype="float32"), "MiB of VMEM of 16 MiB"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = tpu.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize("kind", [*on_tpu.KINDS.values(), device.Device("", "tpu")])
@pytest.mark.parametrize(
    "given",
    [
        spec(), spec(t=4), spec(n=1, k=1), spec(size=8, k=1), spec(size=128, p=1),
        spec(heads_axis=0, dtype="float32"), spec(heads_axis=1, window=(64, 0)),
        spec(size=128, k=32), spec(e=256),
    ],
)  # fmt: skip
def test_what_it_takes(given: Spec, kind: device.Device) -> None:
    assert tpu.supports(given).ok, tpu.supports(given)
    found, _ = worth_measuring(KERNEL.space, given, kind, 8)
    assert found[0] == tpu.default(given, kind)
    assert all(tpu.fits(c, given, kind).ok for c in found)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(), ""),
        (spec(heads_axis=0, k=3, n=3), ""),
        (spec(k=2), ""),
        (spec(p=2), "gathered keys and values of 1024 KiB"),
        (spec(h=64), "copy the pools for a kernel: heads of 64, not of 128"),
        (spec(k=12, n=12), "12 heads behind the positions of a page"),
        (spec(k=2, h=256), "2 heads behind"),
    ],
)
def test_where_it_pays(given: Spec, why: str) -> None:
    verdict = tpu.profitable(given, "tpu")
    assert verdict.ok == (not why)
    assert why in "; ".join(r.text for r in verdict.reasons)


# ----------------------------------------------------------------------- numbers
B, POOL, P = 3, 20, 4
LENGTHS = {"lengths": [5, 32, 17], "empty": [0, 32, 1], "full": None}


def operands(
    heads_axis: int = 2, t: int = 1, n: int = 8, k: int = 2, h: int = 16, e: int = 16,
    size: int = 8, dtype: str = "float32", lengths: Any = (5, 32, 17), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"p": POOL, "z": size, "k": k}
    made = {"q": jax.random.normal(keys[0], (B, t, n, h), dtype)}
    for name, width, key in (("k_pages", h, keys[1]), ("v_pages", e, keys[2])):
        shape = [{**sizes, "h": width}[x] for x in AXES[heads_axis]]
        made[name] = jax.random.normal(key, shape, dtype)
    table = jax.random.permutation(keys[3], POOL)[: B * P]
    made["table"] = table.reshape(B, P)
    if lengths is not None:
        made["kv_lengths"] = jnp.array(lengths)
    return {**made, **{name: jnp.array(x) for name, x in more.items()}}


def exact(given: dict[str, Any], params: dict[str, Any]) -> Any:
    """The formula in float64, over pages gathered by numpy."""
    x = {n: np.asarray(a) for n, a in given.items() if "pages" not in n}
    table, axes = x.pop("table"), AXES[params.get("heads_axis", 2)]
    for name in "kv":
        pool = np.asarray(given[f"{name}_pages"], "float64")
        pool = pool.transpose([axes.index(a) for a in "pzkh"])
        x[name] = pool[table].reshape(B, -1, *pool.shape[2:])
    up = np.zeros((*x["q"].shape[:3], x["v"].shape[3]))
    own = {n: v for n, v in params.items() if n in PARAMS}
    return attention(x, up, own)[0]


def check(pages: int | None = None, params: Any = None, **more: Any) -> None:
    params = {"scale": 0.3, "heads_axis": more.get("heads_axis", 2), **(params or {})}
    given = operands(**more)
    config = {} if pages is None else {"config": tpu.Chunk(pages)}
    got = jax.jit(lambda x: tpu.forward(**x, **params, **config))(given)
    dtype = params.get("out_dtype") or more.get("dtype", "float32")
    assert got.dtype == dtype
    close(got, exact(given, params), more.get("dtype", "float32"), "out")


CASES: dict[str, dict[str, Any]] = {
    "heads first": {"heads_axis": 0},
    "heads second": {"heads_axis": 1, "pages": 3},
    "heads third": {"heads_axis": 2, "pages": 1},
    "one head": {"n": 1, "k": 1, "pages": 2},
    "no groups": {"n": 3, "k": 3, "size": 16},
    "widths": {"h": 24, "e": 40, "pages": 3},
    "several queries": {"t": 3, "pages": 2},
    "every page full": {"lengths": None},
    "bfloat16": {"dtype": "bfloat16", "size": 16},
    "bfloat16 to float32": {"dtype": "bfloat16", "params": {"out_dtype": "float32"}},
    "soft cap": {"params": {"softcap": 1.5}},
    "causal": {
        "t": 3, "lengths": None, "offset": [4, 20, 29], "pages": 2,
        "params": {"window": (None, 0)},
    },
    "window": {
        "t": 3, "offset": [4, 20, 29], "lengths": [7, 23, 32], "pages": 1,
        "params": {"window": (6, 0)},
    },
    "window to the left": {"offset": [4, 31, 16], "params": {"window": (9, None)}},
    "shift": {"t": 2, "lengths": None, "params": {"window": (None, 0), "shift": 12}},
    "sinks": {"sinks": [0.1 * i for i in range(8)], "lengths": [0, 32, 7], "pages": 3},
    **{
        f"empty rows {kind}": {
            "lengths": [0, 32, 1], "pages": 3, "params": {"empty_rows": kind}
        }
        for kind in ("nan", "zero", "mean")
    },
    **{
        f"some empty rows {kind}": {
            "t": 3, "lengths": None, "offset": [-2, 20, 29], "pages": 3,
            "params": {"window": (None, 0), "empty_rows": kind},
        }
        for kind in ("nan", "mean")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", slow.first(12, CASES))
def test_numbers(case: str) -> None:
    with on_tpu.interpreted():
        check(**CASES[case])


@pytest.mark.parametrize(
    "case",
    slow.first(
        3, ["heads first", "window", "sinks", "heads third", "some empty rows mean"]
    ),
)
def test_memory(capfd: pytest.CaptureFixture[str], case: str) -> None:
    with on_tpu.simulated(capfd):
        check(**CASES[case])


@pytest.mark.parametrize(
    ("wraps", "fills"),
    slow.unless(
        lambda wraps, fills: wraps == fills,
        itertools.product([True, False], [True, False]),
        several=True,
    ),
)
def test_numbers_beyond_the_pool(wraps: bool, fills: bool) -> None:
    given = operands()
    given["table"] = given["table"].at[0, 0].set(-1).at[1, 2].set(POOL + 3)
    params = {"wraps": wraps, "fills": fills}
    with on_tpu.interpreted():
        got = tpu.forward(**given, **params)
    close(got, np.asarray(OP.reference(**given, **params)), "float32", "out")


def test_one_table_and_length_for_all() -> None:
    given = operands()
    given |= {n: given[n][1:2] for n in ("table", "kv_lengths")}
    with on_tpu.interpreted():
        got = tpu.forward(**given)
    close(got, np.asarray(OP.reference(**given)), "float32", "out")


BROKEN = (
    "heads first", "heads second", "heads third", "several queries", "window",
    "some empty rows mean", "bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("by", ["mosaic_tpu", "gathered", "reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("case", slow.first(3, BROKEN))
def test_what_is_no_number_stays_in_its_sequence_and_head(
    case: str, bad: float, by: str
) -> None:
    """Of the second sequence all keys, of the third those of one head, and pages
    that no table names."""
    more = dict(CASES[case])
    pages, own = more.pop("pages", 4), more.pop("params", {})
    params = {"scale": 0.3, "heads_axis": more.get("heads_axis", 2), **own}
    given, axes = operands(**more), AXES[params["heads_axis"]]
    at, heads = axes.index("p"), axes.replace("p", "").index("k")
    table = np.asarray(given["table"])
    broken = dict(given)
    for name in ("k_pages", "v_pages"):
        pool = np.moveaxis(np.array(given[name]), at, 0)
        pool[[p for p in range(POOL) if p not in table[[0, 2]]]] = bad
        for page in table[2]:
            np.moveaxis(pool[page], heads, 0)[1] = bad
        broken[name] = jnp.asarray(np.moveaxis(pool, 0, at), given[name].dtype)
    found = {k.name: k.forward for k in KERNELS} | {"reference": OP.reference}
    if by == "mosaic_tpu":
        params["config"] = tpu.Chunk(pages)
    with on_tpu.interpreted():
        run = jax.jit(lambda x: found[by](**x, **params))
        want, got = (np.asarray(run(x), "float64") for x in (given, broken))
    group = want.shape[2] // 2
    assert np.isfinite(want[[0, 2]]).all()
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2, :, :group], want[2, :, :group])
    assert not np.isfinite(got[2, :, group:]).any()
    assert not np.isfinite(got[1]).any()


# -------------------------------------------------------------------------- code
COMPILED = {
    "heads first": spec(heads_axis=0),
    "heads second, f32": spec(heads_axis=1, dtype="float32"),
    "heads third": spec(),
    "small pages": spec(size=8, k=2),
    "large pages": spec(size=128, k=8, n=64, p=8),
    "several queries, window": spec(
        t=4, more={"offset": ((8,), "int32")}, window=(64, 0), empty_rows="mean"
    ),
    "sinks, soft cap": spec(
        k=4, more={"sinks": ((32,), "bfloat16")}, softcap=30.0, dtype="float32"
    ),
}


def program(given: Spec, there: device.Device) -> tuple[Any, Any]:
    params, config = dict(given.params), tpu.default(given, there)
    x = {
        n: jax.ShapeDtypeStruct(given.shape(n), given.dtype(n)) for n in given.operands
    }
    return lambda x: tpu.forward(**x, **params, config=config), x


@on_tpu.needs_compiler
@pytest.mark.parametrize(
    ("generation", "case"),
    slow.unless(
        lambda generation, case: (
            (case == "heads first") != (generation == "v5e")
            and case in ("heads first", "heads second, f32")
        ),
        itertools.product(on_tpu.KINDS, COMPILED),
        several=True,
    ),
)
def test_it_is_compiled_for_each_generation(generation: str, case: str) -> None:
    there = on_tpu.KINDS[generation]
    run, x = program(COMPILED[case], there)
    made = ahead_of_time.compiled(there, run, x)
    assert "paged_attention" in made.as_text()
    pool = COMPILED[case].nbytes("k_pages")
    assert made.memory_analysis().temp_size_in_bytes < pool // 4  # none is copied


@on_tpu.needs_compiler
@pytest.mark.parametrize(
    "given", [spec(h=64), spec(k=12, n=12), spec(k=2, h=256)], ids=["h", "k", "k h"]
)
def test_pools_that_would_be_copied(given: Spec) -> None:
    assert not tpu.profitable(given, "tpu").ok
    made = ahead_of_time.compiled(
        on_tpu.KINDS["v5e"], *program(given, on_tpu.KINDS["v5e"])
    )
    pool = given.nbytes("k_pages")
    assert made.memory_analysis().temp_size_in_bytes >= pool


# ------------------------------------------------------------------------ engine
def decode(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    k, v = (x[table].reshape(q.shape[0], -1, *x.shape[2:]) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def arguments(given: Spec) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(given.shape(n), given.dtype(n)) for n in given.operands
    ]


def test_it_is_chosen_on_a_tpu() -> None:
    report = rewriter.explain(decode, target="tpu_v5e")(*arguments(spec()))
    (site,) = report.sites
    assert (site.op, site.form, site.kernel) == (
        "attention",
        "paged_attention",
        "mosaic_tpu",
    )
    assert "paged_attention mosaic_tpu" in str(report)
    assert report.counts()["attention"] == 1


@pytest.mark.parametrize(
    ("target", "given", "why"),
    [
        ("tpu_v5e", spec(p=2), "so little that XLA is as fast"),
        ("tpu_v5e", spec(h=64), "XLA would copy the pools"),
        ("a100", spec(), "gathers pages as the program does"),
        ("cpu", spec(), "gathers pages as the program does"),
    ],
)
def test_attention_is_kept_with_a_reason(target: str, given: Spec, why: str) -> None:
    options = {} if target == "cpu" else {"target": target}
    (site,) = rewriter.explain(decode, **options)(*arguments(given)).sites
    assert (site.op, site.form) == ("attention", "")
    assert any(why in text for _, text in site.not_chosen), site.not_chosen


def test_end_to_end() -> None:
    given = operands()
    args = [given[n] for n in ("q", "k_pages", "v_pages", "table", "kv_lengths")]
    forced = {"paged_attention": "mosaic_tpu"}
    fast = rewriter.optimize(decode, implementation=forced, require={"attention": 1})
    text = str(jax.export.export(fast, platforms=["tpu"])(*args).mlir_module())
    assert "tpu_custom_call" in text
    plain = jax.export.export(jax.jit(decode), platforms=["tpu"])(*args)
    assert "tpu_custom_call" not in str(plain.mlir_module())


def test_gradients_are_those_of_the_reference() -> None:
    from rewriter.site import site

    given = operands()
    rest = {n: given[n] for n in ("table", "kv_lengths")}
    floats = [given[n] for n in ("q", "k_pages", "v_pages")]

    def loss(kernel: str, q: Any, k: Any, v: Any) -> Any:
        arrays = {"q": q, "k_pages": k, "v_pages": v, **rest}
        out = site.bind(OP, arrays, {}, (("default", kernel),))
        return jnp.sin(out).sum()

    grads = {
        name: jax.jit(jax.grad(lambda *x, name=name: loss(name, *x), (0, 1, 2)))
        for name in ("mosaic_tpu", "reference")
    }
    with on_tpu.interpreted():
        got = grads["mosaic_tpu"](*floats)
    for a, b in zip(got, grads["reference"](*floats), strict=True):
        close(a, np.asarray(b), "float32", "gradient")
