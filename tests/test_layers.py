"""The engine is a list of folders: a module imports only from folders above its own.

Inside a folder no modules import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import pathlib

import networkx as nx
import pytest

from rewriter.kernels.index import OPS

ROOT = pathlib.Path(__file__).parent.parent

FOLDERS = [
    "errors", "support", "_jax", "torch_modules", "config", "ops", "hardware",
    "program", "frameworks", "algebra",
    "find", "gradients", "site", "measure", "rewrite", "choose", "reports",
    "verification", "run", "torch", "testing", "tools", "_moved", "__init__",
    "__main__",
]  # fmt: skip
"""Folders and single files below ``rewriter``, from the first to the last."""

LINES = 500
"""How many lines a file of the package has at most."""

INDEXED = {
    "ops/registry": {"kernels/index", "patterns/index"},
    "run/rewriting": {"patterns/sets"},
    "__main__": {"patterns/index"},
}
"""What modules of the engine may import of kernels and patterns: names alone."""

KERNELS = {"ops", "support", "errors", "kernels"}
NOT_FOR_PATTERNS = {"run", "rewrite", "site", "choose", "measure", "kernels", "_jax"}


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text())


@functools.cache
def imported(path: pathlib.Path) -> set[str]:
    """Modules below ``rewriter`` that a file imports, as paths without suffix."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {place(name) for name in names}
        elif isinstance(node, ast.Import):
            found |= {place(a.name) for a in node.names}
    return found - {""}


def place(dotted: str) -> str:
    """The module that a dotted name of ours is in; "" for a name of others."""
    parts = dotted.split(".")
    assert parts[0] not in ("kernels", "patterns"), f"bare import of {dotted}"
    if parts[0] != "rewriter":
        return ""
    for end in range(len(parts), 0, -1):
        inside = "/".join(parts[1:end]) or "__init__"
        if (ROOT / "rewriter" / f"{inside}.py").exists():
            return inside
        if (ROOT / "rewriter" / inside).is_dir():
            return f"{inside}/__init__"
    return "__init__"


def files(folder: str) -> list[pathlib.Path]:
    """The Python files below a folder; links are not followed."""
    return sorted((ROOT / folder).rglob("*.py"))


def named(path: pathlib.Path) -> str:
    """A file's path below its top folder, without suffix."""
    inside = path.relative_to(ROOT).with_suffix("")
    return "/".join(inside.parts[1:])


ENGINE = [
    p
    for p in files("rewriter")
    if named(p).split("/")[0] not in ("kernels", "patterns")
]


@pytest.mark.parametrize("path", ENGINE, ids=named)
def test_engine(path):
    folder = named(path).split("/")[0]
    assert folder in FOLDERS, f"add {folder} to the list"
    allowed = {*FOLDERS[: FOLDERS.index(folder) + 1]}
    if folder == "__main__":
        allowed.add("__init__")
    here = imported(path) - INDEXED.get(named(path), set())
    assert {name.split("/")[0] for name in here} <= allowed
    if folder != "_jax":  # so that one list names what others need
        internals = {name for name in here if name.startswith("_jax/")}
        assert internals <= {"_jax/__init__"}, "call _jax.name"


def test_no_circles():
    graph = nx.DiGraph(
        (named(path), other)
        for path in ENGINE
        for other in imported(path)
        if not other.endswith("__init__") and other != named(path)
    )
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("path", files("kernels"), ids=named)
def test_kernels(path):
    assert {name.split("/")[0] for name in imported(path)} <= KERNELS


@pytest.mark.parametrize("path", files("patterns"), ids=named)
def test_patterns(path):
    here = {name.split("/")[0] for name in imported(path)}
    assert not here & NOT_FOR_PATTERNS


FACES = {
    "rewriter/_jax",
    "rewriter/algebra/normal_form",
    "rewriter/algebra/canonicalize",
}
"""Folders that are imported from as one: theirs lists the names."""


def test_folders_say_what_they_hold():
    """A folder's `__init__` is a paragraph. Those of ops declare them."""
    for path in [*files("rewriter/"), *files("patterns")]:
        folder = str(path.parent.relative_to(ROOT))
        if path.name == "__init__.py" and folder != "rewriter":
            first, *rest = parsed(path).body
            assert isinstance(first, ast.Expr), folder
            names = [n for n in rest if not isinstance(n, ast.ImportFrom)]
            assert not rest or folder in FACES, f"{folder}: more than a docstring"
            assert all(ast.unparse(n).startswith("__all__") for n in names), folder


PRIMITIVES = {"ragged_dot"}
"""Ops that JAX has a primitive of the same name for, which the engine may know."""


def test_engine_names_no_op():
    """What concerns one op is said by its folder, its pattern, or an index.

    Tools show examples, and some files know old names.
    """
    for path in ENGINE:
        if named(path).split("/")[0] not in ("tools", "__main__", "_moved"):
            constants = (
                n for n in ast.walk(parsed(path)) if isinstance(n, ast.Constant)
            )
            named_here = {n.value for n in constants} & (OPS.keys() - PRIMITIVES)
            assert not named_here, path


def test_only_one_folder_touches_internals():
    for folder in ("rewriter", "kernels", "patterns"):
        for path in files(folder):
            if path.parent != ROOT / "rewriter" / "_jax":
                assert "jax._src" not in path.read_text(), path


@pytest.mark.parametrize("folder", ["rewriter", "kernels", "patterns"])
def test_files_are_short(folder):
    """A file that grows beyond this holds more than one idea: give each its own."""
    lengths = {p: len(p.read_text().splitlines()) for p in files(folder)}
    assert {p: n for p, n in lengths.items() if n > LINES} == {}


def test_links():
    for name in ("kernels", "patterns"):
        link = ROOT / "rewriter" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
        assert not (ROOT / name / "__init__.py").exists()
