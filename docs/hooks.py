"""Puts files of the repository into the site, under the same paths.

Pages link to each other and to sources by their paths in the repository, as GitHub
shows them. So the site keeps those paths, and includes what a page links to.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)")
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "kernels/README.md",
           "patterns/README.md")  # fmt: skip
"""Pages that lie outside of the folder of the documentation."""


def pages() -> list[str]:
    """Returns the paths of all pages, from the root of the repository."""
    inside = sorted((ROOT / "docs").rglob("*.md"))
    return [*OUTSIDE, *(str(p.relative_to(ROOT)) for p in inside)]


def linked(page: str) -> set[str]:
    """Returns the files of the repository, other than pages, that a page links to."""
    found = set()
    for link in LINK.findall((ROOT / page).read_text()):
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
    for path in (*pages(), *sorted(sources)):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files
