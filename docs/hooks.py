"""Puts files of the repository into the site, under the same paths.

Pages link to each other and to sources by their paths in the repository, as GitHub
shows them. So the site keeps those paths, and includes what a page links to. A notebook
is run, and is a page with its outputs.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from docs import notebook_pages

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)")
NOTEBOOK = ".ipynb"
TO_NOTEBOOK = re.compile(rf"(\]\([^)#\s:]+){re.escape(NOTEBOOK)}(?=[)#])")
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "kernels/README.md",
           "patterns/README.md")  # fmt: skip
"""Pages that lie outside of the folder of the documentation."""


def pages() -> list[str]:
    """Returns the paths of all pages, from the root of the repository."""
    found = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", NOTEBOOK)]
    return [*OUTSIDE, *sorted(str(p.relative_to(ROOT)) for p in found)]


def text(page: str) -> str:
    """Returns a page as Markdown; a notebook without outputs."""
    content = (ROOT / page).read_text()
    if not page.endswith(NOTEBOOK):
        return content
    return notebook_pages.markdown(json.loads(content))


def in_site(page: str) -> str:
    """Returns the path of a page in the site, before it is made HTML."""
    return page.removesuffix(NOTEBOOK) + ".md" if page.endswith(NOTEBOOK) else page


def linked(page: str) -> set[str]:
    """Returns the files of the repository, other than pages, that a page links to."""
    found = set()
    for link in LINK.findall(text(page)):
        path = (ROOT / page).parent.joinpath(link).resolve()
        if "://" not in link and path.is_file() and path.suffix != ".md":
            found.add(str(path.relative_to(ROOT)))
    return found


def on_files(files: Any, config: Any) -> Any:
    """Lays out pages, and what they link to, as they lie in the repository."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    sources = set().union(*map(linked, pages()))
    notebooks = [p for p in pages() if p.endswith(NOTEBOOK)]
    for path in sorted({*pages(), *sources}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in notebooks:
        content = _run(path)
        files.append(File.generated(config, in_site(path), content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leads links to notebooks to their pages."""
    return TO_NOTEBOOK.sub(r"\1.md", markdown)


def _run(page: str) -> str:
    """A notebook's page: its cells, what they give, and the notebook to download."""
    path = ROOT / page
    cells = notebook_pages.markdown(notebook_pages.executed(path, path.read_text()))
    return f"{cells}\n<a href='{path.name}' download>Download this notebook</a>\n"
