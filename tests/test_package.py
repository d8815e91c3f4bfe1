"""The package as users get it: wheel, sdist, editable, beside another `kernels`."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".*_cache", "__pycache__", "*.egg-info", "build", "dist", "rewriter_demo"
)
CHECK = """
import sys, rewriter
assert callable(rewriter.optimize) and callable(rewriter.config)
heavy = [m for m in sys.modules if m.split('.')[0] in ('networkx', 'rich', 'flax')
         or m.startswith('jax.experimental.pallas')]
assert not heavy, heavy
import jax.numpy as jnp, kernels
assert kernels.MINE
from rewriter.ops.registry import registry
from rewriter.kernels import attention
assert registry().op('attention') is attention.OP
assert len(registry().ops()) >= 5 and len(registry().patterns()) >= 5
print(rewriter.explain(lambda x: x * jnp.reciprocal(jnp.sqrt(jnp.mean(x * x, -1,
      keepdims=True) + 1e-6)))(jnp.ones((2, 8))).counts()['rms_norm'])
twice = [m for m in sys.modules if m.split('.')[0] in ('patterns', 'kernels')]
assert twice == ['kernels'], twice
files = [m.__file__ for m in {id(m): m for m in sys.modules.values()}.values()
         if (getattr(m, '__name__', '') or '').startswith('rewriter')
         and getattr(m, '__file__', None)]
assert len(files) == len(set(files))
print(rewriter.__file__)
"""


def run(*command, **options):
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check(python, *paths, cwd):
    """Imports the package beside another top-level package called kernels."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    env["JAX_PLATFORMS"] = "cpu"
    found, place = run(python, "-c", CHECK, cwd=cwd, env=env).split()
    assert found == "1"
    return pathlib.Path(place)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A folder with a package called kernels, as the hub's client has."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("MINE = True\n")
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A fresh environment with setuptools that also sees this one's packages."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
    tried = subprocess.run(
        [*map(str, pip), "install", "setuptools>=77"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"no package index: {tried.stderr.strip()[-200:]}")
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = pathlib.Path(run(python, "-c", code).strip())
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree, links kept as links."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
    return folder


BUILD = "from setuptools import build_meta as b; print(b.build_{0}({1!r}))"


@pytest.fixture(scope="module")
def archives(builder, source, tmp_path_factory):
    """The sdist, and the wheel built from the unpacked sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(builder, "-c", BUILD.format("sdist", str(out)), cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    run(builder, "-c", BUILD.format("wheel", str(out)), cwd=unpacked)
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def test_wheel_holds_plain_files(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = wheel.namelist()
        links = [i for i in wheel.infolist() if i.external_attr >> 28 == 0o12]
    assert not links
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"rewriter"}
    for folder, inside in (
        ("kernels", "attention/xla/tiles.py"),
        ("patterns", "sets.py"),
    ):
        assert f"rewriter/{folder}/{inside}" in names
        here = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*.py")}
        assert {f"rewriter/{n}" for n in here} <= set(names)
    assert "rewriter/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_sdist_holds_plain_files(archives):
    with tarfile.open(archives[0]) as sdist:
        assert not [m.name for m in sdist if m.issym() or m.islnk()]
        assert any(n.endswith("rewriter/kernels/attention/xla/tiles.py")
                   for n in sdist.getnames())  # fmt: skip


def test_wheel_runs(archives, other, tmp_path):
    with zipfile.ZipFile(archives[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    place = check(sys.executable, tmp_path / "site", other, cwd=tmp_path)
    assert tmp_path in place.parents


def test_editable_install_runs(builder, source, other, tmp_path):
    run(builder, "-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation",
        "-e", source)  # fmt: skip
    place = check(builder, other, cwd=tmp_path)
    assert place == source / "rewriter" / "__init__.py"


def test_clone_runs(source, other):
    place = check(sys.executable, other, cwd=source)
    assert place == source / "rewriter" / "__init__.py"


def test_versions_agree(archives):
    import rewriter

    assert archives[1].name.startswith(f"jaxpr_rewriter-{rewriter.__version__}-")
