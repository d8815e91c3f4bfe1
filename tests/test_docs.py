"""Every example in a docstring or in the README runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import jax
import pytest

import rewriter
from rewriter import errors

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = (
    "README.md", "kernels/README.md", "patterns/README.md", "CHANGELOG.md",
    "CONTRIBUTING.md",
)  # fmt: skip
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def modules() -> list[str]:
    """Every module of the package, kernels and patterns included."""
    found = [m.name for m in pkgutil.walk_packages(rewriter.__path__, "rewriter.")]
    for folder in ("kernels", "patterns"):
        package = importlib.import_module(f"rewriter.{folder}")
        within = pkgutil.walk_packages(package.__path__, f"rewriter.{folder}.")
        found += [m.name for m in within]
    return [m for m in dict.fromkeys(found) if m != "rewriter.__main__"]


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    # testmod skips names that differ from the module's attribute (optimize.optimize).
    assert doctest.testmod(module, optionflags=flags).failed == 0


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.strip().splitlines()[-1][:40])
def test_readme(block, tmp_path, monkeypatch):
    path = tmp_path / "readme_example.py"  # a file, so that sources have lines
    path.write_text(block)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(path), "exec"), {"__name__": "readme_example"})


def test_readme_begins_with_two_commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    assert [b.strip() for b in blocks] == [
        'python3 -m pip install -e ".[test]" && python3 -m rewriter demo',
        "python3 -m pytest",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    for link in links:
        path = (ROOT / page).parent / link
        assert "://" in link or path.exists(), link


def test_public_names():
    names = [n for n in vars(rewriter) if not n.startswith("_")]
    public = [getattr(rewriter, n) for n in names]
    for thing in public:
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, thing
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
