"""The difference of two reports: sites, kernels, reasons, near misses, counts."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.reports.difference import Count
from rewriter.support.verdict import Reason
from tests.reports.test_report import MISS, REPORT, site
from tests.support.programs import FORCED, block

pytestmark = pytest.mark.once


def changed(**fields):
    return dataclasses.replace(REPORT, **fields)


def test_equal_reports_have_no_difference():
    other = changed(seconds={"trace": 3.0})
    found = REPORT.diff(other)
    assert not found
    assert str(found) == "train_step: both reports say the same"


def test_a_site_gained_and_one_lost():
    first, *rest = REPORT.sites
    new = site(4, "layer_norm", "other.py:3 (f)")
    found = REPORT.diff(changed(sites=(first, new, rest[0])))
    assert [(s.op, s.where, s.text) for s in found.gained] == [
        ("layer_norm", "other.py:3 (f)", "memory_bounded")
    ]
    assert [(s.op, s.where) for s in found.lost] == [("rms_norm", "layers.py:31")]
    assert not found.changed
    assert found.counts == (
        Count("layer_norm", (0, 1), (0, 1)),
        Count("rms_norm", (2, 1), (0, 0)),
    )


def test_a_line_that_moved_is_no_difference():
    before = changed(sites=(site(where="a.py:3 (f)"), site(where="a.py:9 (f)")))
    after = changed(sites=(site(where="a.py:9 (f)"), site(where="a.py:15 (f)")))
    assert not before.diff(after)


@pytest.mark.parametrize("where", ["b.py:3 (f)", "a.py:3 (g)"])
def test_another_file_or_function_is(where):
    before, after = (
        changed(sites=(site(where="a.py:3 (f)"),)),
        changed(sites=(site(where=where),)),
    )
    found = before.diff(after)
    assert (len(found.gained), len(found.lost), len(found.changed)) == (1, 1, 0)


def test_kernel_params_turns_and_reasons_of_one_site():
    first, *rest = REPORT.sites
    other = dataclasses.replace(
        first, kernel="xla", replaced=False, repeats=12,
        params={"window": (None, 0), "scale": 0.25}, not_chosen=(("cudnn", "no GPU"),),
    )  # fmt: skip
    found = REPORT.diff(changed(sites=(other, *rest)))
    (one,) = found.changed
    assert {n: (a, b) for n, a, b in one.fields} == {
        "kernel": ("memory_bounded", "xla"), "replaced": (True, False),
        "repeats": (24, 12), "scale": ("0.125", "0.25"),
    }  # fmt: skip
    assert one.reasons == (("xla: stores 50 MiB",), ("cudnn: no GPU",))
    assert (
        str(found)
        == """\
train_step: 1 changed
   attention: 24 → 12 found, 24 → 0 replaced
 ~ site: attention  model.py:88 (Attention)
     kernel: memory_bounded → xla
     replaced: True → False
     repeats: 24 → 12
     scale: 0.125 → 0.25
     - reason xla: stores 50 MiB
     + reason cudnn: no GPU"""
    )


def test_near_misses():
    gone = REPORT.diff(changed(misses=()))
    assert [(m.op, m.where) for m in gone.misses_lost] == [(MISS.op, MISS.where)]
    assert "1 near miss lost" in str(gone)
    other = dataclasses.replace(MISS, reasons=(Reason("layout", "k is turned"),))
    found = REPORT.diff(changed(misses=(other,)))
    assert [m.text for m in found.misses_gained] == ["k is turned"]
    assert len(found.misses_lost) == 1


def test_failures():
    assert not REPORT.diff(changed(failures=()))
    found = changed(failures=()).diff(REPORT)
    assert found.failures == ("KeyError: x",)
    assert str(found) == "train_step: 1 failure\n + failure: KeyError: x"


def test_reports_of_files():
    saved = json.loads(REPORT.json())
    later = changed(sites=REPORT.sites[:1])
    assert REPORT.diff(saved) == REPORT.diff(REPORT)
    assert rewriter.Report.diff(REPORT, json.loads(later.json())) == REPORT.diff(later)
    data = json.loads(REPORT.diff(later).json())
    assert [s["op"] for s in data["lost"]] == ["rms_norm"] * 2
    assert data["counts"] == [{"op": "rms_norm", "found": [2, 0], "replaced": [0, 0]}]


def test_of_a_real_program():
    params = {"scale": np.ones(8, "f4"), "qkv": np.ones((8, 24), "f4")}
    args = params, np.ones((2, 16, 8), "f4")
    before = rewriter.explain(block, implementation=FORCED)(*args)
    xla = {**FORCED, "attention": "xla"}
    found = before.diff(rewriter.explain(block, implementation=xla)(*args))
    assert [c.op for c in found.changed] == ["attention"]
    assert ("kernel", "memory_bounded", "xla") in found.changed[0].fields
    assert found.counts == (Count("attention", (1, 1), (1, 0)),)


def test_what_is_no_report_is_named():
    report = rewriter.explain(jnp.sin)(1.0)
    assert not report.diff(report.as_dict())
    for other in (3, None, {"kernel": "xla"}):
        with pytest.raises(rewriter.ConfigError, match=r"after=.*a report"):
            report.diff(other)
