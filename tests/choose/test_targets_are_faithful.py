"""A target that is stated chooses what the device itself chooses.

On a GPU, the device that is here is compared with the target of its name. Elsewhere,
what an H200 chose when rows were measured is compared with what its target chooses now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import rewriter
from rewriter.ops.device import of
from tests.bench import held_out, record, rows_of_models
from tests.bench.choices import Row, of_pass

DRAWN = 25
"""Rows that are drawn beside those of models."""


def rows() -> Iterator[Row]:
    yield from rows_of_models.every()
    yield from held_out.drawn_rows(11, DRAWN)


def chosen(row: Row, passes: str, **where: Any) -> list[tuple[str, str]]:
    """The op and the kernel of each site."""
    made = of_pass(row, passes)
    shapes = [jax.ShapeDtypeStruct(*x) for x in made.shapes]
    sites = rewriter.explain(made.fn, **where)(*shapes).sites
    return [(site.op, site.kernel) for site in sites]


@pytest.mark.gpu
def test_a_device_and_its_target_choose_alike() -> None:
    kind = jax.devices()[0].device_kind
    target = of(kind, "cuda")
    if not target.bandwidth:
        pytest.skip(f"there is no target {kind}")
    apart = []
    for row in rows():
        for passes in row.passes:
            here, there = chosen(row, passes), chosen(row, passes, target=kind)
            if here != there:
                apart.append((row.name, passes, here, there))
    assert apart == []


RECORDED = "held_out_seed8_h200"

CHANGED = {"causal 4x944x2/1x80"}
"""Rows for which another kernel is chosen since they were measured. Forwards of norms
are chosen by another model since."""


@pytest.mark.once
def test_a_target_chooses_what_an_h200_chose() -> None:
    """As the record of 100 drawn uses says it, without that device here."""
    programs = {row.name: row for row in held_out.drawn_rows(8, 50)}
    compared = 0
    for row in json.loads(record.named(RECORDED).read_text())["rows"]:
        norm = programs[row["row"]].op.endswith("_norm")
        if row["row"] in CHANGED or (norm and row["pass"] == "forward"):
            continue
        (site,) = chosen(programs[row["row"]], row["pass"], target="h200")
        assert site[1] == row["chosen"][0].split(" ")[0], row["row"]
        compared += 1
    assert compared == 88
