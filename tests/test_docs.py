"""Every example in a docstring or on a page runs; links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import types

import jax
import pytest

import rewriter
from docs import hooks, public_names
from rewriter import errors
from tests.bench import tables

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = hooks.pages()
WITH_CODE = [p for p in PAGES if p.endswith(".md") and "```python" in hooks.text(p)]
WORDS = 30
"""How many words a sentence has at most."""
PYTORCH = ("rewriter.torch", "rewriter.torch_modules.")
"""Modules that import PyTorch."""
HEADS = r" *(- |\*{0,2}\w[\w, .*]*: |Returns|Formula|Looks|Must hold)"
"""What begins an item of a docstring: a bullet, an argument, a part of a pattern."""
FROM_DOCSTRINGS = ("api", "options", "assumptions", "passes", "supported", "operands")
"""Tables that follow from the sources alone."""


def modules() -> list[str]:
    """Every module of the package, kernels and patterns included."""
    found = [m.name for m in pkgutil.walk_packages(rewriter.__path__, "rewriter.")]
    for folder in ("kernels", "patterns"):
        package = importlib.import_module(f"rewriter.{folder}")
        within = pkgutil.walk_packages(package.__path__, f"rewriter.{folder}.")
        found += [m.name for m in within]
    return [m for m in dict.fromkeys(found) if m != "rewriter.__main__"]


def require_pytorch():
    """Skips a test where PyTorch or torchax is not installed."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("torchax is not installed")


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    if name.startswith(PYTORCH):
        require_pytorch()
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    # testmod skips names that differ from the module's attribute (optimize.optimize).
    assert doctest.testmod(module, optionflags=flags).failed == 0


def blocks(page: str) -> str:
    """The Python of a page, each line where it is there."""
    kept, inside = [], False
    for line in (ROOT / page).read_text().splitlines():
        fence = line.startswith("```")
        kept.append(line if inside and not fence else "")
        inside = not inside and line.startswith("```python") if fence else inside
    return "\n".join(kept)


def imported(source: str) -> set[str]:
    """The packages that a source imports at its top level."""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Import)]
    froms = [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom)]
    names = [a.name for n in nodes for a in n.names] + [n.module for n in froms]
    return {str(name).split(".")[0] for name in names}


@pytest.mark.once
@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_code_of_pages(page, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, as a reader would run them."""
    source = blocks(page)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for name in sorted(imported(source) - {"jax", "rewriter"}):
        pytest.importorskip(name, exc_type=ImportError)
    if page == "docs/torch.md":
        require_pytorch()
    path = tmp_path / f"{pathlib.Path(page).stem}.py"  # so that sources have lines
    path.write_text(source)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # for dataclasses
    exec(compile(source, str(path), "exec"), vars(module))


def test_readme_begins_with_two_commands():
    found = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    assert [b.strip() for b in found] == [
        'python3 -m pip install -e ".[test]" && python3 -m rewriter demo',
        "python3 -m pytest",
    ]
    assert len(README.splitlines()) <= 120


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", hooks.text(page), flags=re.M)
    lower = [re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()) for h in heads]
    return {h.replace(" ", "-") for h in lower}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", hooks.text(page), flags=re.S | re.M)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" in link:
            continue
        path = (ROOT / page).parent.joinpath(link).resolve() if link else ROOT / page
        assert path.is_file(), f"{link}: the site has files alone, and no folders"
        if anchor:
            assert anchor in anchors(str(path.relative_to(ROOT))), f"{link}#{anchor}"


def test_every_page_is_in_the_site():
    listed = (ROOT / "mkdocs.yml").read_text()
    names = map(re.escape, map(hooks.in_site, PAGES))
    assert [p for p in names if not re.search(rf"[-:] {p}$", listed, re.M)] == []


def test_site_builds(tmp_path):
    for name in ("mkdocs", "material", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    command += ["-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "docs" / "api.html").exists()
    notebook = (tmp_path / "docs" / "notebooks" / "first_steps.html").read_text()
    assert "class='done'" in notebook


def sentences(page: str) -> list[str]:
    """The sentences of a page as a reader counts them.

    A heading, an item of a list and a cell of a table hold sentences of their own. A
    colon ends none, and words in code count. Examples and targets of links do not.
    """
    text = hooks.text(page)
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.S | re.M)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)]*\)", "", text)
    parts: list[list[str]] = [[]]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            parts += [[cell] for cell in re.split(r"(?<!\\)\|", line)] + [[]]
        elif not line or re.match(r"#+ |[-*] |\d+\. ", line):
            parts.append([re.sub(r"^(#+|[-*]|\d+\.) ", "", line)])
            parts += [[]] if line.startswith("#") else []
        else:
            parts[-1].append(line)
    ends = r"(?<=[.?!])[\"')*_]*\s+"
    return [s for part in parts for s in re.split(ends, " ".join(part))]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    long = [s for s in sentences(page) if len(s.split()) > WORDS]
    assert not long, f"more than {WORDS} words: {long}"


def paragraphs(docstring: str) -> list[str]:
    """The prose of a docstring: no examples, and no lines of tables and diagrams."""
    found: list[list[str]] = []
    text = re.sub(r"^ *>>>.*?(?=\n\s*\n|\Z)", "", docstring, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n", text):
        found.append([])
        for line in block.splitlines():
            if re.search(r"\S {3,}\S", line):
                found.append([])
                continue
            if re.match(HEADS, line):
                found.append([])
            found[-1].append(line.strip())
    return [" ".join(lines) for lines in found]


@pytest.mark.parametrize("folder", ["rewriter", "kernels", "patterns"])
def test_sentences_of_docstrings_are_short(folder):
    """A sentence ends in a stop, also where a list follows, and counts names as one."""
    long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                continue
            for part in paragraphs(ast.get_docstring(node) or ""):
                part = re.sub(r"``[^`]*``|`[^`]*`", "code", part)
                for s in re.split(r"(?<=[.?!])\s+(?=[A-Z*`\[(\"'0-9]|code)", part):
                    if len(s.split()) > WORDS:
                        long.append(f"{path.relative_to(ROOT)}: {s}")
    assert not long, f"more than {WORDS} words: {long}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_follow_the_sources(page):
    text = (ROOT / page).read_text()
    how = f"python3 -m tests.bench.tables --write {' '.join(FROM_DOCSTRINGS)}"
    assert tables.filled(text, FROM_DOCSTRINGS) == text, how


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in public_names.public():
        assert f"### `{name}`" in text, name


def test_public_names():
    names = [n for n in vars(rewriter) if not n.startswith("_")]
    public = [getattr(rewriter, n) for n in names]
    for thing in public:
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, thing
        if inspect.isfunction(thing):
            assert "Example:" in thing.__doc__, thing
    for name in ("optimize", "config", "pattern", "verify", "export"):
        assert callable(getattr(rewriter, name)), name
        assert inspect.ismodule(importlib.import_module(f"rewriter.{name}"))


def test_every_error_is_public_and_documented():
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception):
            assert kind.__doc__
            assert getattr(rewriter, name) is kind


def test_jax_of_this_run_is_a_supported_one():
    assert tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 10)
