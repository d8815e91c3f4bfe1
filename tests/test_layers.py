"""The engine is a list: a module imports only modules above it."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

ORDER = [
    "errors", "assumptions", "verdict", "atomic", "lock", "regular", "_jax",
    "promotion", "config", "activations", "cost", "op", "along", "device", "tpu",
    "ahead_of_time", "kernel", "estimate", "registry", "profile", "timing",
    "conditions", "trace", "repeats", "fold", "constants", "graph", "normal_form",
    "canonicalize", "template", "formula", "emit", "region", "rows", "reading",
    "anew", "stacked", "finder", "sieve", "reference", "check", "match", "declared",
    "bindings", "pattern", "implementation", "key", "measurement", "decision",
    "schema", "stored", "whole", "tuned", "cache", "sources", "choose_sum",
    "choose", "choose_ring", "special_form", "plan", "standing", "gradients",
    "backward_place", "as_written", "leaves", "remains", "oracle", "rounding",
    "deciding", "probes", "judge", "compare", "uses", "kernel_call", "levels",
    "implement", "site", "residual_stream", "equations", "bodies", "loops", "work",
    "kept", "recompute", "memory_order", "sums", "sums_of_parts", "absorb",
    "policies", "threads", "programs", "inputs", "least_time", "candidate", "times",
    "race", "whole_race", "isolate", "static_cost", "autotune", "propagation",
    "shards", "ring", "splice", "pairs", "reached", "replace", "locate", "unfold",
    "placing", "planner", "parts", "pipeline", "placement", "deferred",
    "collectives", "draw", "report", "checked", "analysis", "optimize", "tune",
    "verify", "roofline", "bench", "bench_table", "bench_peers", "bench_ops",
    "export", "demo", "__init__", "__main__",
]  # fmt: skip

KERNELS = {
    "activations", "cost", "op", "device", "kernel", "verdict", "errors",
    "estimate", "registry", "kernels", "tpu",
}  # fmt: skip
NOT_FOR_PATTERNS = {"optimize", "pipeline", "replace", "site", "kernels", "_jax"}


def imported(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            parts = (node.module or "").split(".")
            if parts[0] == "rewriter":
                found |= {parts[1]} if parts[1:] else {a.name for a in node.names}
            assert parts[0] not in ("kernels", "patterns"), f"{path}: bare import"
        elif isinstance(node, ast.Import):
            for name in node.names:
                parts = name.name.split(".")
                if parts[0] == "rewriter" and parts[1:]:
                    found.add(parts[1])
    return found


def files(folder: str) -> list[pathlib.Path]:
    """The Python files below a folder."""
    return sorted((ROOT / folder).rglob("*.py"))


MODULES = sorted((ROOT / "rewriter").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_engine(path):
    assert path.stem in ORDER, f"add {path.name} to the list"
    allowed = set(ORDER[: ORDER.index(path.stem)])
    if path.stem in ("registry", "pipeline", "__main__"):
        allowed |= {"patterns", "kernels"}  # found by name, loaded on first use
    public = {"__version__", "__init__"} if path.stem == "__main__" else set()
    assert imported(path) <= allowed | public


@pytest.mark.parametrize("path", files("kernels"), ids=lambda p: p.stem)
def test_kernels(path):
    assert imported(path) <= KERNELS


@pytest.mark.parametrize("path", files("patterns"), ids=lambda p: p.stem)
def test_patterns(path):
    assert not imported(path) & NOT_FOR_PATTERNS


def test_only_one_file_touches_internals():
    for folder in ("rewriter", "kernels", "patterns"):
        for path in files(folder):
            if path.name != "_jax.py":
                assert "jax._src" not in path.read_text(), path


def test_links():
    for name in ("kernels", "patterns"):
        link = ROOT / "rewriter" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
        assert not (ROOT / name / "__init__.py").exists()
