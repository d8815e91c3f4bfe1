"""Times and memory of sites: those by which kernels are chosen, and none besides."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.kernels import attention as attention_op
from rewriter.kernels.attention.memory import temporary
from rewriter.kernels.attention.op import OP
from rewriter.kernels.gated_linear_unit.memory import temporary as units_memory
from rewriter.kernels.linear_cross_entropy.memory import temporary as loss_memory
from rewriter.kernels.norms.memory import temporary as norms_memory
from rewriter.kernels.ragged.dot.memory import temporary as ragged_memory
from rewriter.measure.costs import UNKNOWN, Costs, modelled_costs
from rewriter.ops.device import Device
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.reports.costs import Total, costs_text, total
from rewriter.support.sizes import size_text
from tests.reports.test_report import REPORT, site
from tests.support.programs import FORCED, rms_norm

pytestmark = pytest.mark.once

ROWS = jax.ShapeDtypeStruct((8192, 4096), "bfloat16")
SCALE = jax.ShapeDtypeStruct((4096,), "bfloat16")
H200 = Device("NVIDIA H200", "cuda")
MODEL = {"target": "h200", "tune": "off"}
FOLDER = pathlib.Path(attention_op.__file__).parent
RESULTS = pathlib.Path(__file__).parents[1] / "bench/results"
HEADS = jax.ShapeDtypeStruct((4, 4096, 16, 128), "bfloat16")


def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.1
    weights = jax.nn.softmax(scores.astype("float32")).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def loss(x, w):
    return rms_norm(x, w).astype("float32").sum()


def only(fn, *args, **options):
    (found,) = rewriter.explain(fn, **options)(*args).sites
    return found


def test_a_model_of_the_device_knows_times_alone():
    forward = only(rms_norm, ROWS, SCALE, **MODEL)
    report = rewriter.explain(jax.grad(loss, (0, 1)), **MODEL)(ROWS, SCALE)
    (both,) = report.sites
    for found, passes in ((forward, "forward"), (both, "forward_and_vjp")):
        costs = found.costs
        assert (costs.source, costs.passes) == ("estimated", passes)
    nothing = forward.costs.before_bytes, forward.costs.after_bytes
    assert nothing == (0, 0)
    assert both.costs.saved_bytes is None
    assert "temporary memory" not in str(report)
    assert both.replaced
    assert both.costs.after_us < both.costs.before_us
    assert " → " in str(report)
    assert "(estimated, forward and backward)" in str(report)


def test_measurements_know_memory_too():
    report = rewriter.explain(attention, target="h200")(HEADS, HEADS, HEADS)
    (found,) = report.sites
    costs = found.costs
    assert (found.origin, costs.source) == ("shipped", "measured")
    assert costs.after_us < costs.before_us
    assert costs.after_bytes < costs.before_bytes
    assert f"temporary memory {size_text(costs.before_bytes)} → " in str(report)
    assert report.costs().known == 1


UNKNOWN_CASES = [
    ("heuristic", {}),
    ("forced", {"implementation": FORCED}),
    ("heuristic", {"numerics": "strict", "target": "h200"}),
]


@pytest.mark.parametrize(("origin", "options"), UNKNOWN_CASES)
def test_nothing_is_made_up(origin, options):
    report = rewriter.explain(rms_norm, **options)(ROWS, SCALE)
    (found,) = report.sites
    assert found.origin == origin
    assert found.costs == UNKNOWN
    assert report.costs() is None
    assert "sites take" not in str(report)
    data = json.loads(report.json())
    assert data["costs"] is None
    assert data["sites"][0]["costs"] is None


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_times_of_another_shape_are_not_shown_as_its_own(target):
    more = jax.ShapeDtypeStruct((5, *HEADS.shape[1:]), HEADS.dtype)
    found = only(attention, more, more, more, target=target)
    assert (found.origin, found.costs.source) == ("nearest", "estimated")
    model = only(attention, more, more, more, target=target, tune="off")
    assert found.costs.after_us == pytest.approx(model.costs.after_us)
    assert found.costs.before_us == pytest.approx(model.costs.before_us)
    own = {"before_us": model.costs.before_us, "after_us": model.costs.after_us}
    assert dataclasses.replace(found.costs, **own) == model.costs
    times = [why for _, why in found.not_chosen if "against" in why]
    assert times
    assert all(why.startswith("for a near shape or chip, ") for why in times)


def test_sizes_that_are_symbols_have_no_time():
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    assert only(rms_norm, x, SCALE, target="h200").costs == UNKNOWN


def test_the_sum_counts_turns_and_leaves_out_what_is_not_known():
    def model(w, x):
        return jax.lax.scan(lambda c, _: (rms_norm(c, w), None), x, None, length=7)[0]

    report = rewriter.explain(model, **MODEL)(SCALE, ROWS)
    one, all_of_it = report.sites[0].costs, report.costs()
    assert all_of_it.before_us == pytest.approx(7 * one.before_us)
    assert (all_of_it.known, all_of_it.sites) == (7, 7)
    known = Costs(10.0, 4.0, 100, 40, "measured", "forward")
    other = Costs(5.0, 5.0, source="estimated", passes="forward")
    sites = (
        site(1, repeats=3, costs=known),
        site(2, costs=other),
        site(3, costs=Costs(None, 4.0, source="estimated")),
        site(4),
    )
    assert total(sites) == Total(35.0, 17.0, 4, 6, 100, 40, ("measured", "estimated"))
    report = dataclasses.replace(REPORT, sites=sites)
    assert report.text().splitlines()[2] == (
        " sites take 35 µs as written, 17 µs as rewritten "
        "(measured, estimated, 4 of 6 sites); temporary memory of the largest "
        "100 B → 40 B"
    )
    data = json.loads(report.json())
    assert data["costs"]["before_us"] == 35.0
    assert data["sites"][0]["costs"]["after_bytes"] == 40


def test_memory_of_attention_is_estimated():
    heads = jax.ShapeDtypeStruct((3, 3000, 24, 128), "bfloat16")
    scores = 2 * 3 * 24 * 3000**2
    for fn, times, kept in (
        (attention, 2, 0),
        (jax.grad(lambda *a: attention(*a).astype("float32").sum(), (0, 1, 2)), 4, 8),
    ):
        costs = only(fn, heads, heads, heads, target="h100", tune="off").costs
        assert costs.source == "estimated"
        assert costs.before_bytes == times * scores
        assert costs.after_bytes in {kept * 3 * 24 * 3000, kept * 3 * 24 * 3000 * 65}
        assert costs.saved_bytes == costs.before_bytes - costs.after_bytes
    decode = jax.ShapeDtypeStruct((8, 1, 24, 128), "bfloat16")
    keys = jax.ShapeDtypeStruct((8, 30000, 24, 128), "bfloat16")
    costs = only(attention, decode, keys, keys, target="h100", tune="off").costs
    assert costs.before_us
    assert costs.saved_bytes is None


def test_estimates_of_memory_agree_with_shipped_measurements():
    near, seen = 0, 0
    for name in ("nvidia_h100_80gb_hbm3", "nvidia_h200"):
        shipped = FOLDER / "tuned" / f"{name}.json"
        for entry in json.loads(shipped.read_text())["entries"]:
            key = entry["key"]
            shapes = {n: jax.ShapeDtypeStruct(x, key["dtypes"][n])
                      for n, x in key["shapes"].items()}  # fmt: skip
            guess = temporary(spec_of(OP, shapes, {}), H200, key["pass"])
            for m in entry["measurements"]:
                if "temp_bytes" not in m:  # timed alone
                    continue
                kernel = m["implementation"]["forward"]
                if kernel == "xla":
                    ratio = m["temp_bytes"] / guess["xla"]
                    assert 0.5 <= ratio <= 1.3
                    near, seen = near + (0.95 < ratio < 1.15), seen + 1
                elif kernel in guess:
                    off = abs(m["temp_bytes"] - guess[kernel])
                    assert off < 0.1 * guess["xla"]
    assert seen > 40
    assert near > 0.8 * seen


OTHERS = {
    ("norms", "rms_norm"): norms_memory, ("norms", "layer_norm"): norms_memory,
    ("gated_linear_unit", "gated_linear_unit"): units_memory,
    ("ragged/dot", "ragged_dot"): ragged_memory,
}  # fmt: skip


@pytest.mark.parametrize(("folder", "name"), OTHERS)
def test_so_do_those_of_other_ops(folder, name):
    op, seen = registry().op(name), 0
    for kind in ("nvidia_h100_80gb_hbm3", "nvidia_h200"):
        file = FOLDER.parent / folder / "tuned" / f"{kind}.json"
        for entry in json.loads(file.read_text())["entries"]:
            key = entry["key"]
            if key["op"] != name:
                continue
            shapes = {n: jax.ShapeDtypeStruct(x, key["dtypes"][n])
                      for n, x in key["shapes"].items()}  # fmt: skip
            guess = OTHERS[folder, name](spec_of(op, shapes, {}), H200, key["pass"])
            for m in entry["measurements"]:
                kernel = m["implementation"]["forward"]
                whole = not m["implementation"].get("backward")
                if kernel in guess and whole and m["temp_bytes"] is not None:
                    off = abs(m["temp_bytes"] - guess[kernel])
                    assert off <= 0.1 * guess["xla"] + (1 << 14), (key, kernel)
                    seen += 1
    assert seen > 6


def test_memory_of_a_loss_is_that_of_a_benchmark():
    file = RESULTS / "vocabulary_loss_h100.json"
    device = Device("NVIDIA H100 80GB HBM3", "cuda", memory=80 << 30)
    op = registry().op("linear_cross_entropy")
    ways = {
        ("forward", "xla"): "forward as written",
        ("forward", "memory_bounded"): "forward, ours",
        ("forward_and_vjp", "xla"): "as written",
        ("forward_and_vjp", "memory_bounded"): "ours, 512 MiB",
    }
    for row in json.loads(file.read_text())["rows"]:
        n, k, v = row["rows, k, v"]
        shapes = {
            "x": jax.ShapeDtypeStruct((n, k), "bfloat16"),
            "w": jax.ShapeDtypeStruct((k, v), "bfloat16"),
            "labels": jax.ShapeDtypeStruct((n,), "int32"),
        }
        for (passes, name), way in ways.items():
            guess = loss_memory(spec_of(op, shapes, {}), device, passes)[name]
            measured = row["ways"][way]["temporary_mib"] * (1 << 20)
            assert 0.7 < measured / guess < 1.35, (row, way)


def test_nothing_is_said_of_other_platforms():
    cpu = Device("cpu", "cpu")
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8192, 4096), (4096,)))
    spec = spec_of(registry().op("layer_norm"), {"x": x, "scale": w, "bias": w}, {})
    assert norms_memory(spec, cpu, "forward_and_vjp") == {}


def test_what_does_not_fit_has_no_time():
    assert modelled_costs(float("inf"), 1e-3, "forward").before_us is None
    assert modelled_costs(0.0, float("inf"), "forward") == UNKNOWN


@pytest.mark.parametrize(
    ("costs", "replaced", "text"),
    [
        (Costs(2500.0, 500.0, 2048, 12, "measured", "forward_and_vjp"), True,
         "2.5 ms → 500 µs; temporary memory 2 KiB → 12 B (measured, forward and backwa"
         "rd)"),
        (Costs(25.0, 25.0, source="estimated"), False, "25 µs as written (estimated)"),
        (Costs(None, 5.0, source="estimated"), True, "5 µs as rewritten (estimated)"),
        (UNKNOWN, True, ""),
    ],
)  # fmt: skip
def test_words(costs, replaced, text):
    assert costs_text(costs, replaced) == text
