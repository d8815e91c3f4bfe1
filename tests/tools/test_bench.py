"""Work counted, modes, faulty kernels, the command; never a time."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.__main__ import main
from rewriter.hardware import timing
from rewriter.kernels.attention.reference import visible
from rewriter.kernels.attention.visibility import Visibility
from rewriter.measure import candidate, inputs, programs, times
from rewriter.measure.programs import Task
from rewriter.ops import device
from rewriter.ops.cost import MODES, Cost
from rewriter.ops.kernel import Kernel, Spec, from_function, spec_of
from rewriter.ops.op import Op, Operand
from rewriter.ops.registry import Registry, package_of, registry
from rewriter.support.verdict import no
from rewriter.tools import bench, bench_ops, bench_peers, roofline

pytestmark = pytest.mark.once

SHIPPED = (
    "attention", "gated_linear_unit", "layer_norm", "ragged_dot",
    "ragged_gated_linear_unit", "rms_norm",
)  # fmt: skip
BLOCK = ["tests.support.programs:block", "--args", "tests.support.programs:inputs"]


def cost_of(op, shapes, mode="forward", dtype="float32", **params):
    """What an op's cost says of operands of one dtype; sizes of groups are int32."""
    op = registry().op(op)
    dtypes = {n: "int32" if n == "group_sizes" else dtype for n in shapes}
    return op.cost(shapes, dtypes, {**op.defaults, **params}, mode)


# --------------------------------------------------------------------- cost
@pytest.mark.parametrize("op", SHIPPED)
def test_shipped_costs_have_examples_that_run(op):
    module = importlib.import_module(f"{package_of(op)}.cost")
    cost = registry().op(op).cost
    assert getattr(cost, "func", cost) is module.cost
    assert "Example:" in module.cost.__doc__
    assert doctest.testmod(module).failed == 0


QKV = {"q": (2, 6, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 16)}


@pytest.mark.parametrize(
    ("params", "pairs"),
    [
        ({}, 36),
        ({"window": (None, 0)}, 1 + 2 + 3 + 4 + 5 + 6),
        ({"window": (1, 0)}, 1 + 2 + 2 + 2 + 2 + 2),
        ({"window": (1, 1)}, 2 + 3 + 3 + 3 + 3 + 2),
        ({"window": (None, 0), "shift": 2}, 3 + 4 + 5 + 6 + 6 + 6),
    ],
)
def test_attention_counts_visible_pairs(params, pairs):
    products = 2 * 4 * pairs  # batch, heads, pairs
    forward, both = (cost_of("attention", QKV, m, **params) for m in MODES[::2])
    assert forward.flops == products * (2 * 8 + 2 * 16)
    assert both.flops - forward.flops == products * (6 * 8 + 4 * 16)


def test_attention_bytes():
    q, k, v, out = (4 * math.prod(s) for s in (*QKV.values(), (2, 6, 4, 16)))
    assert cost_of("attention", QKV).bytes == q + k + v + out
    vjp = cost_of("attention", QKV, "vjp").bytes
    assert vjp == 2 * (q + k + v) + out  # operands, their gradients, the cotangent
    last = {"q": (1, 1, 4, 8), "k": (1, 64, 4, 8), "v": (1, 64, 4, 8)}
    near = cost_of("attention", last, window=(15, 0), shift=63)
    assert near.bytes == 4 * (32 + 2 * 16 * 32 + 32)  # sixteen of the keys are read


def test_attention_backward_is_two_and_a_half_forwards():
    square = dict.fromkeys("qkv", (4, 4096, 16, 128))
    one = {m: cost_of("attention", square, m, "bfloat16") for m in MODES}
    assert one["vjp"].flops == 2.5 * one["forward"].flops
    assert one["forward_and_vjp"].flops == 3.5 * one["forward"].flops
    causal = cost_of("attention", square, window=(None, 0)).flops
    assert causal == pytest.approx(one["forward"].flops / 2, rel=1e-3)
    assert one["forward"].flops == 4 * 4 * 16 * 4096**2 * 128


def test_attention_whose_positions_are_not_known_counts_all():
    given = {**QKV, "offset": (2,)}
    free = cost_of("attention", given, window=(None, 0))
    assert free.flops == cost_of("attention", QKV).flops
    both = cost_of("attention", given, window=(2, 0))
    assert both.flops == 2 * 4 * 6 * 3 * (2 * 8 + 2 * 16)


def test_a_prefix_is_counted_as_half_of_the_keys():
    given = {**QKV, "prefix": (2,)}
    for window, pairs in (((None, 0), 3 + 3 + 3 + 4 + 5 + 6), ((None, None), 36)):
        count = cost_of("attention", given, window=window)
        assert count.flops == 2 * 4 * pairs * (2 * 8 + 2 * 16)


@pytest.mark.parametrize("window", [(None, 0), (2, 0), (None, -3), (None, -9), (1, 1)])
@pytest.mark.parametrize("shift", [0, 3, -12])
@pytest.mark.parametrize("prefix", [0, 1, 4])
def test_pairs_and_keys_against_a_table_of_what_is_seen(window, shift, prefix):
    for t, s in ((5, 6), (8, 9), (9, 5)):
        table = visible(t, s, window=window, shift=shift, prefix=jnp.array([prefix]))
        table = np.broadcast_to(table[0, 0], (t, s))
        count = table.sum(), table.any(0).sum()
        view = Visibility(t, s, *window, shift, prefix=prefix)
        assert view.count() == count


def test_matrix_products():
    unit = {"x": (2, 3, 5), "w_gate": (5, 7), "w_up": (5, 7)}
    product = 2 * 6 * 5 * 7
    flops = [cost_of("gated_linear_unit", unit, m).flops for m in MODES]
    assert flops == [2 * product, 6 * product, 6 * product]
    assert cost_of("gated_linear_unit", unit).bytes == 4 * (30 + 70 + 42)
    for kind, right in (
        ("forward", (4, 5, 7)), ("transposed", (4, 7, 5)), ("contracting", (640, 7)),
    ):  # fmt: skip
        ragged = {"lhs": (640, 5), "rhs": right, "group_sizes": (4,)}
        cost, dtypes = registry().op("ragged_dot").cost, dict.fromkeys(ragged, "int32")
        flops = [cost(ragged, dtypes, {"mode": kind}, m).flops for m in MODES]
        product = 2 * 640 * 5 * 7
        assert flops == [product, 2 * product, 3 * product]


def test_few_rows_read_few_experts():
    ragged = {"lhs": (1, 8), "rhs": (64, 8, 8), "group_sizes": (64,)}
    assert cost_of("ragged_dot", ragged).bytes == 4 * (8 + 64 + 64 + 8)


def test_norms_pass_over_the_rows():
    rows = {"x": (16384, 4096)}
    size = 2 * 16384 * 4096
    for op in ("rms_norm", "layer_norm"):
        moved = [cost_of(op, rows, m, "bfloat16").bytes / size for m in MODES]
        assert moved == [2, 3, 5]
    both = cost_of("layer_norm", {"x": (4, 8), "scale": (8,), "bias": (8,)}, "vjp")
    assert both.flops == 32 * 16
    assert cost_of("rms_norm", {"x": (4, 8), "scale": (8,)}).flops == 32 * 4


@pytest.mark.parametrize(
    ("op", "shapes", "mode"),
    [
        ("attention", dict.fromkeys("qkv", (1, 64, 2, 256)), "forward"),
        *(
            ("gated_linear_unit",
             {"x": (64, 256), "w_gate": (256, 128), "w_up": (256, 128)}, mode)
            for mode in ("forward", "forward_and_vjp")
        ),
    ],
)  # fmt: skip
def test_dense_products_agree_with_xla(op, shapes, mode):
    found = registry().op(op)
    structs = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    run = programs.reference(Task(found, spec_of(found, structs, {}), (), mode))
    out = jax.eval_shape(lambda **x: found.reference(**x), **structs)
    args = (structs,) if mode == "forward" else (structs, out)
    analysis = jax.jit(run).lower(*args).cost_analysis()
    assert cost_of(op, shapes, mode).flops == pytest.approx(analysis["flops"], rel=0.04)


# ----------------------------------------------------------------- roofline
H200 = device.named("h200")


def test_rate_and_its_bound():
    found = roofline.rate(Cost(420e12, 1e9), 1.0, H200)
    assert (found.share, found.bound, found.warning) == (0.5, "compute", "")
    found = roofline.rate(Cost(1e12, 2.15e12), 1.0, H200)
    assert (found.share, found.bound) == (0.5, "memory")
    found = roofline.rate(Cost(1e12, 1e12), 1.0, device.named("cpu"))
    assert (found.share, found.bound, found.flops) == (None, "", 1e12)


def test_impossible_rates_are_said_to_be():
    fast = roofline.rate(Cost(1.7e15, 1e9), 1.0, H200).warning
    assert "1.7 PFLOP/s is more than the 840 TFLOP/s measured" in fast
    assert "cache" not in fast
    small = roofline.rate(Cost(1e3, 1e6), 1e-7, H200).warning
    assert "10 TB/s is more" in small
    assert "the operands fit the cache" in small


def test_plot_wants_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(rewriter.ConfigError, match=r"jaxpr-rewriter\[plot\]"):
        roofline.plot([], H200, str(tmp_path / "roof.svg"))
    assert main(["bench", "--op", "rms_norm", "--plot", "x.svg"]) == 2
    assert 'pip install "jaxpr-rewriter[plot]"' in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["h200", "cpu"])
def test_plot(tmp_path, kind):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: jaxpr-rewriter[plot]")
    points = [
        roofline.Point("attention xla", Cost(1e12, 1e9), 0.1),
        roofline.Point("attention cudnn", Cost(1e12, 1e9), 0.01),
    ]
    path = tmp_path / "roof.svg"
    roofline.plot(points, device.named(kind), str(path))
    assert path.read_text().startswith("<?xml")
    with pytest.raises(rewriter.ConfigError, match=r"\.png or \.svg"):
        roofline.plot(points, H200, str(tmp_path / "roof.doc"))


# ---------------------------------------------------------- whole functions
def dense(x, w):
    """A function whose gradients are known."""
    return jnp.tanh(x @ w)


ARGS = (jnp.ones((4, 8)) / 8, jnp.ones((8, 16)) / 8)


def test_vjp_returns_gradients_and_the_other_mode_both():
    given = bench.cotangents_of(dense, ARGS)
    _, back = jax.vjp(dense, *ARGS)
    wanted = back(given[0])
    gradients = bench.with_vjp(dense, ARGS, "vjp")(given, *ARGS)
    out, again = bench.with_vjp(dense, ARGS, "forward_and_vjp")(given, *ARGS)
    np.testing.assert_allclose(out, dense(*ARGS))
    for got in (gradients, again):
        assert len(got) == 2
        jax.tree.map(np.testing.assert_allclose, tuple(got), tuple(wanted))


def test_a_scalar_has_the_cotangent_one_and_integers_have_none():
    fn = lambda x, i: (jnp.sum(x**2) * i, i + 1)
    args = (jnp.arange(3.0), 2)
    given = bench.cotangents_of(fn, args)
    assert given == [None]
    (out, count), (gradient,) = bench.with_vjp(fn, args, "forward_and_vjp")(
        given, *args
    )
    assert (float(out), int(count)) == (10.0, 3)
    np.testing.assert_allclose(gradient, 4 * args[0])


@pytest.mark.parametrize("mode", [*bench.MODES])
def test_modes(mode):
    result = rewriter.benchmark(dense, mode=mode, pairs=1)(*ARGS)
    assert tuple(r.mode for r in result.rows) == bench.MODES[mode]
    data = json.loads(result.json())
    for row in data["rows"]:
        for program in (row["original"], row["rewritten"]):
            assert program["method"] in ("wall clock", "cupti")
            assert 0 < program["minimum_ms"] <= program["median_ms"]
        assert row["original"]["flops"] == row["rewritten"]["flops"]
    assert data["faster"] == all(r["faster"] for r in data["rows"])


def test_operations_are_those_of_the_program_as_written():
    both = rewriter.benchmark(dense, pairs=1)(*ARGS).rows
    product = 2 * 4 * 8 * 16
    forward, gradients = (r.original for r in both)
    assert product <= forward.flops < 1.5 * product
    assert 3 * product <= gradients.flops < 4 * product
    assert forward.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)


def test_loops_are_not_counted_once():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    args = jnp.ones((4, 8)), jnp.ones((3, 8, 8))
    (row,) = rewriter.benchmark(layers, mode="forward", pairs=1)(*args).rows
    assert row.original.flops is None
    assert row.original.share is None


def time(median, error=0.0):
    return bench.Timing(median, 0.0, None, 0.0, median, error, "wall clock")


@pytest.mark.parametrize(
    ("before", "after", "faster"),
    [
        (time(1.0), time(0.5), True),
        (time(1.0), time(1.019), True),
        (time(1.0), time(1.03), False),
        (time(1.0, 0.03), time(1.1, 0.04), True),  # three errors are 0.15
        (time(1.0, 0.03), time(1.2, 0.04), False),
    ],
)
def test_faster_or_as_fast(before, after, faster):
    row = bench.Comparison("forward", before, after)
    assert row.faster is faster
    result = rewriter.benchmark(dense, mode="forward", pairs=1)(*ARGS)
    assert replace(result, rows=(row,)).faster is faster
    good = bench.Comparison("vjp", time(1.0), time(1.0))
    assert replace(result, rows=(good, row)).faster is faster
    assert ("slower" in str(replace(result, rows=(row,)))) is not faster


def test_rates_above_the_device_are_flagged(monkeypatch):
    slow = device.Device("abacus", "cpu", flops=1.0, bandwidth=1.0)
    monkeypatch.setattr(device, "attached", lambda: slow)
    result = rewriter.benchmark(dense, mode="forward", pairs=1)(*ARGS)
    text = str(result)
    assert "original: not to be believed" in text
    assert "rewritten: not to be believed" in text
    assert "of what the device can do" in text
    assert result.rows[0].original.share > 1
    assert (
        "not to be believed"
        in json.loads(result.json())["rows"][0]["original"]["warning"]
    )


# -------------------------------------------------------------- ops' kernels
DOUBLE = Op(
    name="double",
    operands=(Operand("x", "d", True),),
    out="d",
    reference=lambda x: 2 * x,
    sample=lambda key, operands, params: {
        "x": jax.random.normal(key, operands["x"].shape)
    },
    cost=lambda shapes, dtypes, params, mode: Cost(1e3, 1e3),
)
USE = Spec("double", (("x", (64,)),), (("x", "float32"),), ())


def raising(x):
    raise RuntimeError("no such instruction\nmore")


def kernel_with(name, forward, factor):
    """A kernel with a backward of its own."""
    return Kernel(
        name, "double", ("cpu",), 1,
        forward=lambda *, x, residuals=False:
            (forward(x), ()) if residuals else forward(x),
        backward=lambda *, x, out, residuals, cotangent: {"x": factor * cotangent},
    )  # fmt: skip


def registered(*kernels):
    found = Registry(builtin=False)
    found.add_op(DOUBLE)
    for one in kernels:
        found.add_kernel(one)
    return found


FAULTY = registered(
    from_function(lambda x: x + x, DOUBLE, "good"),
    from_function(lambda x: 2.6 * x, DOUBLE, "wrong"),
    from_function(lambda x: jnp.where(x > 0, 2 * x, jnp.nan), DOUBLE, "nan"),
    from_function(raising, DOUBLE, "raising"),
    from_function(lambda x: x[:3], DOUBLE, "short"),
    from_function(lambda x: 2 * x, DOUBLE, "picky",
                  supports=lambda spec: no("size", "wants 65 numbers")),
    from_function(lambda x: 2 * x, DOUBLE, "elsewhere", platforms=("tpu",)),
    kernel_with("good_gradient", lambda x: x + x, 2.0),
    kernel_with("wrong_gradient", lambda x: x + x, 3.0),
)  # fmt: skip


def rows_of(among=FAULTY, **options):
    found = bench_ops.bench_ops([USE], among=among, turns=1, **options)
    return found, {r.implementation: r for r in found.rows}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for a CPU")
def test_faulty_kernels_have_a_reason_and_no_time():
    found, rows = rows_of(mode="forward")
    timed = {name for name, row in rows.items() if row.timing}
    assert timed == {"xla", "good", "good_gradient", "wrong_gradient"}
    assert rows["wrong"].reason.startswith("wrong: error 3e-01 in the result")
    assert rows["wrong"].error == pytest.approx(0.3, rel=1e-3)
    assert rows["nan"].reason.startswith("wrong: error inf")
    assert rows["raising"].reason == (
        "does not compile: RuntimeError: no such instruction"
    )
    assert "returned float32[3]; expected float32[64]" in rows["short"].reason
    assert rows["picky"].reason == "refused: wants 65 numbers"
    assert rows["elsewhere"].reason == "refused: runs on tpu, not on cpu"
    data = {r["implementation"]: r for r in json.loads(found.json())["rows"]}
    assert data["nan"]["error"] is None
    text = str(found)
    for name, row in rows.items():
        assert name in text
        assert row.reason in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for a CPU")
@pytest.mark.parametrize("mode", ["vjp", "forward_and_vjp"])
def test_gradients_are_checked(mode):
    _, rows = rows_of(mode=mode)
    assert rows["good"].timing  # its gradient is the reference's
    assert rows["good_gradient"].timing
    wrong = rows["wrong_gradient"]
    assert wrong.timing is None
    assert wrong.reason.startswith("wrong: error 5e-01 in the gradient of x")


def test_names_of_implementations():
    _, rows = rows_of(mode="forward", implementations=["good"])
    assert list(rows) == ["good"]
    with pytest.raises(rewriter.ConfigError, match="Did you mean 'good'"):
        rows_of(implementations=["goood"])
    with pytest.raises(rewriter.ConfigError, match="Choose forward, vjp"):
        rows_of(mode="gradient")


def compiled(name, factor):
    return candidate.Compiled(name, lambda operands: factor * operands["x"])


def test_a_reference_that_does_not_run_is_replaced_by_what_does():
    def out_of_memory(operands):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    truth = candidate.Compiled("the reference", out_of_memory)
    args = ({"x": jnp.ones(4)},)
    programs = [
        replace(truth, name="xla"), compiled("a", 2.0), compiled("b", 2.0),
        compiled("c", 3.0),
    ]  # fmt: skip
    xla, a, b, c = candidate.checked(programs, truth, [args, args])
    assert xla.reason == (
        "does not run: out of memory: RESOURCE_EXHAUSTED: out of memory"
    )
    assert a.reason == b.reason == ""
    assert a.note.endswith("not checked")
    assert b.note.endswith("compared with a")
    assert c.reason.startswith("wrong: error 5e-01")
    (none,) = candidate.checked(programs[:1], truth, [args])
    assert "RESOURCE_EXHAUSTED" in none.reason


def test_every_set_of_inputs_is_checked():
    late = candidate.Compiled(
        "late", lambda operands: jnp.where(operands["x"] > 1, 3, 2) * operands["x"]
    )
    sets = [({"x": jnp.full(4, x)},) for x in (1.0, 2.0)]
    truth = compiled("the reference", 2.0)
    assert candidate.checked([late], truth, sets[:1])[0].reason == ""
    assert candidate.checked([late], truth, sets)[0].reason.startswith("wrong")


def test_one_that_fails_when_timed_does_not_take_the_others_along(monkeypatch):
    measured = timing.measure

    def fragile(programs, inputs, turns):
        if any(p.bad for p in programs):
            raise RuntimeError("out of memory")
        return measured(programs, inputs, turns)

    class Program:
        def __init__(self, bad):
            self.bad = bad

        def __call__(self, x):
            return x

    monkeypatch.setattr(timing, "measure", fragile)
    good, bad = (candidate.Compiled(str(bad), Program(bad)) for bad in (False, True))
    drawn = [inputs.Inputs("", ((jnp.ones(2),),))]
    found = times.time_in_turns([good, bad], drawn, 1)
    assert found["True"] == "does not run: RuntimeError: out of memory"
    assert found["False"].runs == 1


def test_inputs_in_turn():
    assert inputs.input_sets(1 << 10, device.named("cpu")) == 1
    assert inputs.input_sets(1 << 30, H200) == 3
    for nbytes in (1 << 22, 1 << 25):
        sets = inputs.input_sets(nbytes, H200)
        assert sets >= 3
        assert sets * nbytes >= 2 * H200.cache or sets == 16


@pytest.mark.parametrize("op", SHIPPED)
def test_named_sets(op):
    for name in ("small", "others", "targets"):
        uses = bench_ops.named_uses(op, name)
        assert uses
        for use in uses:
            assert bench_ops._cost(registry().op(op), use, "forward_and_vjp").flops > 0
    with pytest.raises(rewriter.ConfigError, match="others, simulated, small, targets"):
        bench_ops.named_uses(op, "unknown")


def test_targets_are_counted_as_published():
    full, causal = bench_ops.named_uses("attention", "targets")[:2]
    op = registry().op("attention")
    rates = [
        bench_ops._cost(op, use, "forward").flops / ms / 1e9
        for use, ms in ((full, 0.810), (causal, 0.466))
    ]
    assert rates == pytest.approx([679, 590], rel=0.005)


def test_peers_that_are_not_installed_are_a_line():
    (use, *_) = bench_ops.named_uses("attention", "small")
    functions, missing = bench_peers.candidates(use, "cpu")
    assert {n for n, _ in functions} | set(missing) == {"tokamax", "torch"}
    assert all("not installed" in m or "only" in m for m in missing.values())
    (norm,) = bench_ops.named_uses("rms_norm", "small")
    functions, missing = bench_peers.candidates(norm, "cpu")
    assert {n for n, _ in functions} | set(missing) == {"tokamax", "torch"}
    (ragged, *_) = bench_ops.named_uses("ragged_dot", "small")
    functions, missing = bench_peers.candidates(ragged, "cpu")
    assert {n for n, _ in functions} | set(missing) == {"tokamax"}
    masked = spec_of(
        registry().op("attention"),
        {n: jax.ShapeDtypeStruct((1, 8, 2, 4), "float32") for n in "qkv"},
        {"window": (2, 0)},
    )
    assert not bench_peers.torch_takes(masked)


# ---------------------------------------------------------------- command
def run(capsys, *argv):
    code = main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="refusals of a CPU")
def test_command_for_ops(capsys, tmp_path):
    path = tmp_path / "ops.json"
    code, out, _ = run(
        capsys, "bench", "--op", "attention,rms_norm", "--shapes", "small", "--turns",
        "1", "--mode", "vjp", "--peers", "--json", "--out", str(path),
    )  # fmt: skip
    assert code == 0
    data = json.loads(out)
    assert json.loads(path.read_text()) == data
    assert {r["op"] for r in data["rows"]} == {"attention", "rms_norm"}
    by_name = {r["implementation"]: r for r in data["rows"] if r["op"] == "attention"}
    assert by_name["cudnn"]["reason"] == "refused: runs on cuda, not on cpu"
    assert by_name["memory_bounded"]["timing"]["flops"] > 0
    assert by_name["memory_bounded"]["error"] < 1e-5
    assert {r["mode"] for r in data["rows"]} == {"vjp"}
    assert set(data["sets"].values()) == {1}
    assert data["versions"]["jax"] == jax.__version__


def test_command_prints_a_table(capsys):
    code, out, _ = run(
        capsys, "bench", "--op", "ragged_dot", "--shapes", "small", "--turns", "1",
        "--mode", "forward", "--implementations", "xla", "--ascii",
    )  # fmt: skip
    assert code == 0
    assert out.isascii()
    assert "ragged_dot  float32: lhs 256x64, rhs 8x64x128, group_sizes int32 8" in out
    assert "in turn)" in out or "1 set of inputs" in out
    assert "xla" in out
    assert "memory_bounded" not in out


def test_command_for_a_function(capsys, tmp_path):
    path = tmp_path / "block.json"
    code, out, _ = run(
        capsys, "bench", *BLOCK, "--turns", "1", "--mode", "forward", "--out", str(path)
    )
    assert code == 0
    assert "1 interleaved pairs" in out
    assert json.loads(path.read_text())["function"] == "block"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--op", "atention"], "Did you mean 'attention'"),
        (["--op", "rms_norm", "--shapes", "huge"], "others, simulated, small, targets"),
        (["--op", "rms_norm", "--implementations", "cudnn"], "Known: hopper, memory"),
        (["--op", "rms_norm", "--mode", "fast"], "Choose forward, vjp"),
        ([*BLOCK, "--op", "rms_norm"], "--op with tests.support.programs:block"),
        (["--patterns=-rms_norm"], "--patterns without a function"),
    ],
)
def test_mistakes(capsys, argv, text):
    code, _, err = run(capsys, "bench", *argv)
    assert code == 2
    assert text in err
