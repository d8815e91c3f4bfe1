"""Notebooks of the documentation run from the first cell to the last."""

from __future__ import annotations

import json

import pytest

from docs import hooks, notebook_pages

NOTEBOOKS = [p for p in hooks.pages() if p.endswith(hooks.NOTEBOOK)]
SHOWN = {
    "first_steps": (
        "✓ attention",
        "forward and backward",
        "rewriter.benchmark(attention)",
    ),
    "report": ("✗ attention", "✓ attention", "0 of 1 replaced"),
}
"""What the outputs of a notebook must hold, by its name."""


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(page):
    cells = json.loads((hooks.ROOT / page).read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert code
    assert not any(c["outputs"] or c["execution_count"] for c in code)


@pytest.mark.once
@pytest.mark.parametrize("page", NOTEBOOKS)
@pytest.mark.filterwarnings("ignore")  # of the packages that run notebooks
def test_a_notebook_runs(page):
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name)
    path = hooks.ROOT / page
    made = notebook_pages.markdown(notebook_pages.executed(path, path.read_text()))
    for text in SHOWN[path.stem]:
        assert text in made
    assert "In[1]:" in made, "lines of cells have the cell's number"
    assert "ipykernel" not in made


def test_what_cells_give():
    def cell(**output):
        source = ["1 + 1"]
        code = {"cell_type": "code", "source": source, "outputs": [output]}
        return notebook_pages.markdown({"cells": [code]}).partition("```\n\n")[2]

    stream = {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n"]}
    assert cell(**stream, name="stdout") == "```text\nred\n```\n"
    assert cell(**stream, name="stderr") == ""
    html = {"text/html": ["<p>\n", "\n", "2</p>"], "text/plain": "2"}
    got = cell(output_type="execute_result", data=html)
    assert got == '<div class="output"><p>&#10;&#10;2</p></div>\n'
    assert cell(output_type="display_data", data={"text/plain": "2"}).count("2") == 1
