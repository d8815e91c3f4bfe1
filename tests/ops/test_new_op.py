"""The recipes of CONTRIBUTING: what they quote is so, and a new op needs no more."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILE = re.compile(r'^```py title="([\w/.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

PROGRAM = '''
import jax, jax.numpy as jnp, numpy as np, rewriter
from rewriter.ops.registry import registry

assert "soft_cap" in registry().ops()
assert registry().op("soft_cap").names == ("x",)


def capped(x):
    return jnp.sin(30.0 * jnp.tanh(x / 30.0)).sum()


def others(x):
    """A bound that is not the divisor, and a negative one."""
    return 29.0 * jnp.tanh(x / 30.0) - 30.0 * jnp.tanh(x / -31.0)


x = jax.random.normal(jax.random.key(0), (8, 128)) * 40
(site,) = rewriter.explain(capped)(x).sites  # matched
assert (site.op, site.kernel, site.params["bound"]) == ("soft_cap", "from_result", 30)
assert not rewriter.explain(others)(x).sites
negative = rewriter.explain(lambda x: -30.0 * jnp.tanh(x / -30.0))(x)
assert "a bound of -30.0, not above 0" in str(negative.why_not("soft_cap"))

forced = {"implementation": {"soft_cap": "from_result"}, "strict": True}
fast = rewriter.optimize(capped, **forced)
steps = [jax.value_and_grad(f)(x) for f in (capped, fast)]  # called, with its gradient
for want, got in zip(*steps, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

tuned = rewriter.tune(capped)(x)  # tuned
print(tuned)
assert "from_result" in str(tuned)

artifact = rewriter.export(fast, platforms="cpu")(x)  # exported
(kept,) = artifact.manifest["sites"]
assert kept["op"] == "soft_cap"
artifact.save("capped.bin")
np.testing.assert_allclose(rewriter.load("capped.bin").call(x), capped(x), rtol=1e-5)
'''


def recipe(title: str) -> list[tuple[str, str]]:
    """The files of a recipe: names and texts."""
    _, _, after = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## {title}\n")
    return FILE.findall(after.partition("\n## ")[0])


def added(tree: pathlib.Path) -> list[str]:
    """Adds the files of the recipe to a package; returns their names."""
    blocks = recipe("A new op")
    for name, text in blocks:
        path = tree / name
        if path.name == "index.py":
            rest, end, after = path.read_text().rpartition("}")
            path.write_text(rest + text + end + after)
        else:
            path.parent.mkdir(exist_ok=True)
            assert not path.exists(), f"{name} is taken"
            path.write_text(text)
    return [name for name, _ in blocks]


QUOTE = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("quote", QUOTE.findall((ROOT / "CONTRIBUTING.md").read_text()))
def test_what_the_recipes_quote_is_in_the_sources(quote: str) -> None:
    """Those of a spelling, a rule, a kernel and its line."""
    folders = ("kernels", "rewriter/algebra", "tests/spellings")
    files = (path for f in folders for path in (ROOT / f).rglob("*.py"))
    assert any(quote in path.read_text() for path in files)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the package with the op of the recipe."""
    here = tmp_path_factory.mktemp("package")
    shutil.copytree(
        ROOT / "rewriter",
        here / "rewriter",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    assert added(here / "rewriter") == [
        "kernels/soft_cap/reference.py", "kernels/soft_cap/xla.py",
        "kernels/soft_cap/__init__.py", "kernels/index.py",
        "patterns/soft_cap.py", "patterns/index.py",
    ]  # fmt: skip
    return here


@pytest.mark.once
def test_the_files_of_the_recipe_are_all_that_an_op_needs(
    package: pathlib.Path,
) -> None:
    """It is matched, called, tuned and exported."""
    env = os.environ | {
        "PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu",
        "REWRITER_CACHE_DIR": str(package / "cache"),
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=package, env=env, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_files_of_the_recipe_are_in_our_style(package: pathlib.Path) -> None:
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    added_files = ["kernels/soft_cap", "patterns/soft_cap.py"]
    run = subprocess.run(
        [ruff, "check", "--config", str(ROOT / "pyproject.toml"), *added_files],
        cwd=package / "rewriter", text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


# ------------------------------------------------------------------ a new spelling
SPELLING = """
from tests.spellings import check
from tests.spellings.corpus import BY_NAME

(found,) = (s for name, s in BY_NAME.items() if "cube_root" in name)
assert not check.wrong(found), check.wrong(found)
"""


@pytest.mark.once
def test_a_case_and_a_rule_are_all_that_a_spelling_needs(
    tmp_path: pathlib.Path,
) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "bench", "results")
    for folder in ("rewriter", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)

    def outcome() -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, "-c", SPELLING], cwd=tmp_path, env=env, text=True,
            capture_output=True, check=False,
        )  # fmt: skip

    for name, text in recipe("A new spelling"):
        path = tmp_path / name
        path.write_text(path.read_text() + text)
        ended = outcome()  # the case alone is missed; with the rule it is found
        assert (ended.returncode == 0) == (name.startswith("rewriter")), ended.stderr
