"""The report in words: marks, counts, reasons, ASCII, JSON, HTML."""

from __future__ import annotations

import html
import json

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.find.match import NearMiss
from rewriter.measure.costs import Costs
from rewriter.reports.costs import Total
from rewriter.reports.report import Report
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text
from rewriter.support.verdict import Reason
from tests.support.programs import FORCED, block, inputs


def site(index=1, op="attention", where="model.py:88 (Attention)", **changes):
    given = {
        "repeats": 1, "scope": "", "shapes": "q f32[2]", "params": {},
        "kernel": "memory_bounded", "origin": "heuristic", "replaced": True,
    }  # fmt: skip
    return Site(index, op, where, **{**given, **changes})


MISS = NearMiss(
    "attention",
    "vision.py:140 (Pool)",
    (
        Reason("layout", "k is permuted", "vision.py:137"),
        Reason("escape", "probabilities are also returned", "vision.py:143"),
    ),
    "scores: expected c·Σ q k, found 60·tanh(…)",
    0.85,
    "return weights only when asked for",
)

REPORT = Report(
    "train_step", "0.12.0", "cpu", "default",
    sites=(
        site(1, repeats=24, scope="scan", params={"window": (None, 0), "scale": 0.125},
             not_chosen=(("xla", "stores 50 MiB"),)),
        site(2, "rms_norm", "layers.py:31", kernel="xla", replaced=False,
             not_chosen=(("memory_bounded", "xla is as fast"),)),
        site(3, "rms_norm", "layers.py:31", kernel="xla", replaced=False,
             not_chosen=(("memory_bounded", "xla is as fast"),)),
    ),
    misses=(MISS,),
    failures=(Reason("failure", "KeyError: x", "a.py:1"),),
    seconds={"trace": 0.21, "match": 0.03},
)  # fmt: skip

TEXT = """\
rewriter.explain(train_step)   jax 0.12.0   cpu   patterns: default
 24 of 27 candidates rewritten, 2 kept, 1 missed    trace 0.21 s, match 0.03 s
 times: not estimated on a CPU; rewriter.tune measures them

 ✓ attention  ×24 in scan  model.py:88 (Attention)  memory_bounded [heuristic]  #1
     causal; scale 0.125
     not chosen: xla (stores 50 MiB)
 = rms_norm   ×2           layers.py:31             xla: xla is as fast  #2-3
 ✗ attention  ×1           vision.py:140 (Pool)     k is permuted    vision.py:137
     probabilities are also returned    vision.py:143
   next: return weights only when asked for
 ✗ left as written: KeyError: x    a.py:1"""


def test_text():
    assert str(REPORT) == TEXT


def test_ascii_twin():
    text = REPORT.text(ascii=True)
    assert text.isascii()
    assert " + attention  x24 in scan" in text


def test_counts():
    assert REPORT.counts()["attention"] == 24
    assert REPORT.counts()["group_norm"] == 0  # counted where there is none
    assert REPORT.counts(repeats=False)["attention"] == 1
    assert REPORT.counts(repeats=False)["rms_norm"] == 2
    assert REPORT.counts(backward=True)["attention"] == 0


def test_at():
    assert len(REPORT.at("layers.py").sites) == 2
    assert len(REPORT.at("model.py:88").sites) == 1
    assert not REPORT.at("model.py:8").sites
    assert len(REPORT.at("vision.py:140").misses) == 1


def test_why_not():
    text = REPORT.why_not("attention")
    assert "60·tanh" in text
    assert "rms_norm" not in text
    assert "xla is as fast" in REPORT.why_not("rms_norm")
    nothing = "nothing in train_step is close to ragged_dot"
    assert REPORT.why_not("ragged_dot") == nothing


def test_json():
    data = json.loads(REPORT.json())
    assert data["sites"][0]["params"]["window"] == "(None, 0)"
    assert data["misses"][0]["reasons"][0]["code"] == "layout"
    assert data["counts"]["attention"] == 24


def test_no_sites_is_a_result():
    text = str(rewriter.explain(jnp.sin)(1.0))
    assert "no candidates: nothing here is close to a pattern" in text


def test_page_and_picture(tmp_path):
    def model(params, x):
        return jax.lax.scan(lambda c, _: (block(params, c), None), x, None, length=3)[0]

    report = rewriter.explain(model, implementation=FORCED)(*inputs())
    assert report.counts()["attention"] == 3
    report.html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "site attention" in page
    assert len(report.svg(site=1)) <= len(report.svg())
    assert "<svg" in report._repr_html_()


def test_a_page_fits_a_phone_and_numbers_agree(tmp_path):
    report = rewriter.explain(block, implementation=FORCED)(*inputs())
    report.html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "width=device-width" in page
    assert "pre-wrap" in page
    assert "<b class='done'>" in page
    for n in {s.index for s in report.sites}:
        assert f"#{n}" in report.text()
        assert f"#{n}" in report.svg()
    (own,) = [s for s in report.sites if s.op == "attention"]
    assert f"site attention #{own.index}" in report.svg(site=own.index)
    with pytest.raises(ValueError, match="site=99: no site has this number; known: 1"):
        report.svg(site=99)
    assert f"#{own.index}" in next(
        line for line in report.text().splitlines() if " attention" in line
    )


def test_the_style_of_a_report_in_a_notebook_reaches_no_other_picture():
    fragment = rewriter.explain(block, implementation=FORCED)(*inputs())._repr_html_()
    style = fragment[: fragment.index("</style>")].removeprefix("<style>")
    rules = [rule.partition("{")[0] for rule in style.split("}") if rule]
    assert all(rule.startswith(".rewriter") for rule in rules), rules


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
def test_treescope_shows_the_report_as_a_notebook_does():
    treescope = pytest.importorskip("treescope")
    shown = treescope.render_to_html(REPORT, compressed=False)
    assert REPORT._repr_html_() in html.unescape(shown)


def test_kernels_that_are_not_chosen_for_one_reason_stand_together():
    def attend(q, k, v):
        scores = jnp.einsum("bth,bsh->bts", q, k, preferred_element_type=v.dtype)
        return jax.nn.softmax(scores) @ v

    q, v = (jax.ShapeDtypeStruct((4, 1024, 64), x) for x in ("bfloat16", "float32"))
    text = rewriter.explain(attend, target="h100")(q, q, v).text()
    assert "hopper, hopper_decode (tensor cores take" in text
    assert text.count("a cast would round") == 1


def test_saved_bytes():
    assert Costs(2.0, 1.0, 100, 30, "measured").saved_bytes == 70
    assert Costs(2.0, 1.0, source="estimated").saved_bytes is None
    total = Total(5.0, 2.0, 1, 1, 100, 30, ("measured",))
    assert (total.saved_bytes, total.saved_us) == (70, 3.0)


def unit(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


UNIT = {"gate": jnp.ones((8, 16)), "up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}


@pytest.mark.parametrize("loop", [False, True])
def test_a_checkpointed_site_is_one_row(loop):
    layer = jax.checkpoint(lambda p, x: x + unit(p, x))

    def loss(p, x):
        if loop:
            x, _ = jax.lax.scan(lambda x, _: (layer(p, x), None), x, None, length=3)
        else:
            x = layer(p, layer(p, layer(p, x)))
        return (x**2).sum()

    step, args = jax.grad(loss), (UNIT, jnp.ones((4, 8)))
    report = rewriter.explain(step, implementation=FORCED)(*args)
    assert report.counts()["gated_linear_unit"] == 3
    assert report.counts(backward=True)["gated_linear_unit"] == 3
    inside = "scan/remat" if loop else "remat"
    assert {(s.backward, s.again) for s in report.sites} == {(True, inside)}
    (row,) = [t for t in str(report).splitlines() if "gated_linear_unit" in t]
    assert "×3 in scan" in row if loop else "×3  " in row
    assert f"forward and backward; the forward runs again in {inside}" in str(report)
    assert "0 of 3 candidates rewritten, 3 kept" in str(report)


def test_a_checkpoint_that_is_not_differentiated_runs_once():
    report = rewriter.explain(jax.checkpoint(unit))(UNIT, jnp.ones((4, 8)))
    (site,) = report.sites
    assert (site.scope, site.again, site.backward) == ("remat", "", False)


def test_equal_sites_that_are_no_recomputation_count_twice():
    def twice(p, x):
        return jax.lax.cond(x[0, 0] > 0, unit, lambda p, x: unit(p, x) + 1, p, x)

    report = rewriter.explain(twice)(UNIT, jnp.ones((4, 8)))
    assert report.counts()["gated_linear_unit"] == 2


def test_where_is_the_users_line():
    report = rewriter.explain(block)(*inputs())
    assert {s.where.split(":")[0] for s in report.sites} == {"programs.py"}


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (2048, "2 KiB"), (3 << 30, "3 GiB")]
)
def test_size(count, text):
    assert size_text(count) == text


def test_an_epsilon_beside_the_root_is_a_near_miss() -> None:
    def norm(x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / (x.std(-1, keepdims=True) + 1e-6)

    (miss,) = rewriter.explain(norm)(jnp.ones((4, 8))).misses
    assert miss.op == "layer_norm"
    assert "added to the root" in miss.reasons[0].text
    assert "sqrt(mean(x²) + eps)" in miss.suggestion


@pytest.mark.parametrize("centred", [False, True])
def test_a_larger_one_of_two_under_the_root_is_a_near_miss(centred: bool) -> None:
    def norm(x: jax.Array) -> jax.Array:
        y = x - x.mean(-1, keepdims=True) if centred else x
        square = jnp.var(x, -1) if centred else jnp.mean(x * x, -1)
        return y * jax.lax.rsqrt(jnp.maximum(square, 1e-6))[:, None]

    (miss,) = rewriter.explain(norm)(jnp.ones((4, 8))).misses
    assert miss.op == ("layer_norm" if centred else "rms_norm")
    assert "is under the root, and not their sum" in miss.reasons[0].text
    assert "sqrt(max(" in miss.suggestion

    def l2_norm(x: jax.Array) -> jax.Array:  # which is no norm of these
        squares = jnp.sum(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))

    assert not rewriter.explain(l2_norm)(jnp.ones((4, 8))).misses


def test_a_miss_inside_a_librarys_jit_has_the_users_line() -> None:
    def gated(x, w, u):
        return jax.nn.silu(x @ w) * (x @ u + jnp.sin(x @ u))

    x, w = jnp.ones((4, 8)), jnp.ones((8, 6))
    inner = jax.make_jaxpr(jax.nn.silu)(x).eqns[0].params["jaxpr"].eqns
    assert [e.primitive.name for e in inner] == ["logistic", "mul"]  # under a jit
    (miss,) = rewriter.explain(gated)(x, w, w).misses
    assert miss.op == "gated_linear_unit"
    assert miss.where.startswith("test_report.py:")


@pytest.mark.parametrize("argument", [0, 1])
def test_a_loss_and_its_gradient_are_no_attention(argument: int) -> None:
    def cross_entropy(w, x, labels):
        scores = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(scores, labels[:, None], -1).mean()

    def log_sum_exp(w, x, labels):
        scores = x @ w
        chosen = jnp.take_along_axis(scores, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(scores, -1) - chosen).mean()

    args = jnp.ones((32, 100)), jnp.ones((8, 32)), jnp.zeros(8, int)
    for loss in (cross_entropy, log_sum_exp):
        for fn in (loss, jax.value_and_grad(loss, argument)):
            report = rewriter.explain(fn)(*args)
            assert [s.op for s in report.sites] == ["linear_cross_entropy"]
            assert not report.misses
