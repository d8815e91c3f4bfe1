"""Turns notebooks into pages: their cells alone, or with what the cells print.

A notebook is kept without outputs, so that a change of it can be read. The site runs it
while it is built, and shows what each cell gives.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
from typing import Any

SECONDS = 300
"""How long a cell may run."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def markdown(notebook: dict[str, Any]) -> str:
    """Returns the cells of a notebook as Markdown, with the outputs that it holds.

    Args:
        notebook: The notebook as JSON gives it, version 4.
    """
    return "\n\n".join(map(_cell, notebook["cells"])) + "\n"


@functools.cache
def executed(path: pathlib.Path, text: str) -> dict[str, Any]:
    """Returns a notebook with outputs, after its cells ran in a kernel of this Python.

    It runs on the CPU, as on a reader's laptop. A cell that fails is an error.

    Args:
        path: Where it lies; its cells run in that folder.
        text: Its text. A text that ran before is not run again.
    """
    import nbclient
    import nbformat

    notebook = nbformat.reads(text, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=["--Application.log_level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    root = str(path.parent.parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"})
    return json.loads(nbformat.writes(notebook))


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = map(_output, cell["outputs"])
    return "\n\n".join((f"```python\n{source}\n```", *filter(None, shown)))


def _output(output: dict[str, Any]) -> str:
    """An output as Markdown: HTML or a picture if it has one, else its text."""
    if output["output_type"] == "stream":
        return _text(output["text"]) if output["name"] == "stdout" else ""
    data = output["data"]
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:  # in one line: an empty one would end the block of HTML
            line = "".join(data[kind]).strip().replace("\n", "&#10;")
            return f'<div class="output">{line}</div>'
    return _text(data["text/plain"])


def _text(text: str | list[str]) -> str:
    return f"```text\n{COLOURS.sub('', ''.join(text)).rstrip()}\n```"
