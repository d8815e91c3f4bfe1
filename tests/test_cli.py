"""The command line: output, JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import rewriter
from rewriter.__main__ import main

BLOCK = ["tests.support.programs:block", "--args", "tests.support.programs:inputs"]


def run(capsys, *argv):
    code = main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_explain(capsys, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "explain", *BLOCK, "--ascii", "--html", str(page))
    assert code == 0
    assert "rewriter.explain(block)" in out
    assert out.isascii()
    assert page.exists()
    code, out, _ = run(capsys, "explain", *BLOCK, "--json", "--patterns=-attention")
    assert json.loads(out)["counts"]["rms_norm"] == 1
    assert json.loads(out)["counts"]["attention"] == 0


def test_explain_all(capsys, tmp_path):
    file = tmp_path / "several.py"
    file.write_text(
        "import jax.numpy as jnp\n"
        "def norm(x):\n    square = (x * x).mean(-1, keepdims=True)\n"
        "    return x / jnp.sqrt(square + 1e-6)\n"
        "def double(x):\n    return x * 2\n"
        "def of_two(x, y):\n    return x + y\n"
        "def of_two_args():\n    return 1.0, 2.0\n"
        "def of_three(x, y, z):\n    return x\n"
        "def _private(x):\n    return x\n"
        "args = (jnp.ones((2, 4)),)\n"
    )
    code, out, _ = run(capsys, "explain", "--all", str(file), "--json")
    named = {r["function"]: r["counts"]["rms_norm"] for r in json.loads(out)["reports"]}
    assert (code, named) == (0, {"norm": 1, "double": 0, "of_two": 0})
    file.with_name("none.py").write_text("x = 1\n")
    code, _, err = run(capsys, "explain", "--all", str(file.with_name("none.py")))
    assert code == 2
    assert "no function with arguments" in err
    code, _, err = run(capsys, "explain", "--all", str(file), "--html", "x.html")
    assert code == 2


def test_explain_all_of_a_folder(capsys, tmp_path):
    """Files without arguments are not run; one that fails is named, others go on."""
    double = "def double(x):\n    return x * 2\n"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.py").write_text(f"{double}args = (1.0,)\n")
    (tmp_path / "c.py").write_text("raise SystemExit('was run')\n")
    hidden = tmp_path / ".venv"
    hidden.mkdir()
    (hidden / "d.py").write_text("raise SystemExit('was run')\nargs = ()\n")
    command = "explain", "--all", str(tmp_path), "--json"
    code, out, _ = run(capsys, *command)
    assert (code, len(json.loads(out)["reports"])) == (0, 1)
    (tmp_path / "a.py").write_text(f"import not_there\n{double}args = (1.0,)\n")
    code, out, _ = run(capsys, *command)
    found = json.loads(out)
    assert (code, len(found["reports"])) == (1, 1)
    assert "not_there" in found["failed"][str(tmp_path / "a.py")]
    (tmp_path / "a.py").write_text(
        f"def f(x):\n    return x['a']\n{double}args = (1.0,)\n"
    )
    code, out, _ = run(capsys, *command)
    found = json.loads(out)
    assert (code, len(found["reports"])) == (1, 2)
    assert list(found["failed"]) == [f"{tmp_path / 'a.py'}:f"]
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, "explain", "--all", str(tmp_path / "empty"))
    assert code == 2
    assert "has no file with arguments" in err


@pytest.mark.parametrize("attached", [False, True])
def test_libtpu_has_nothing_to_look_for_without_a_tpu(capsys, monkeypatch, attached):
    """It would print errors when JAX starts; a TPU that is there is left alone."""
    monkeypatch.setattr(rewriter.__main__, "tpu_is_attached", lambda: attached)
    for name in rewriter.__main__.WITHOUT_TPU:
        monkeypatch.setenv(name, "mine")  # so that it is put back
        monkeypatch.delenv(name)
    assert run(capsys, "patterns")[0] == 0
    found = {n: os.environ.get(n) for n in rewriter.__main__.WITHOUT_TPU}
    there = dict.fromkeys(found)
    assert found == (there if attached else rewriter.__main__.WITHOUT_TPU)


def test_require(capsys):
    assert run(capsys, "explain", *BLOCK, "--require", "attention.found=1")[0] == 0
    several = "attention.found=2,attention=1,rms_norm.found=1"
    code, _, err = run(capsys, "explain", *BLOCK, "--require", several)
    assert code == 1
    assert "RequirementNotMet: block: require={'attention': {'found': 2, 're" in err
    assert "attention: 0 of 1 replaced by a kernel, 1 of 2 found" in err


def test_verify_bench_export(capsys, tmp_path):
    code, out, _ = run(capsys, "verify", *BLOCK, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    code, out, _ = run(capsys, "bench", *BLOCK, "--mode", "forward", "--pairs", "2")
    assert "forward" in out
    path = str(tmp_path / "a")
    code, out, _ = run(capsys, "export", *BLOCK, "--out", path, "--platforms", "cpu")
    assert code == 0
    assert os.path.exists(path + ".manifest.json")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["explain", "tests.support.programs"], "expected module:name"),
        (["explain", "tests.support.programs:block"], "--args tests.support.program"),
        (["explain", "tests.support.programs:blok"], "Did you mean 'block'"),
        (["explain", "no_such_module:f"], "cannot import 'no_such_module'"),
        (["explain", *BLOCK, "--require", "a=b"], "expected attention, all"),
        (["bench", *BLOCK, "--mode", "fast"], "Choose forward"),
    ],
)
def test_mistakes(capsys, argv, text):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert text in err


def test_lists(capsys):
    assert "attention" in run(capsys, "patterns")[1]
    rows = json.loads(run(capsys, "kernels", "--json")[1])
    assert {"attention", "ragged_dot"} <= {r["op"] for r in rows}
    assert "jax" in json.loads(run(capsys, "env", "--json")[1])


def test_demo(tmp_path):
    command = [sys.executable, "-m", "rewriter", "demo", "--small", "--out", "here"]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "✓ ragged_dot" in done.stdout or "= attention" in done.stdout
    assert "temporary" in done.stdout
    assert (tmp_path / "here" / "demo.stablehlo.manifest.json").exists()


def test_tune_and_cache(capsys, tmp_path, monkeypatch):
    from rewriter.measure import cache

    monkeypatch.setenv("REWRITER_CACHE_DIR", str(tmp_path / "cache"))
    cache._process.cache_clear()
    out_file = tmp_path / "tuned.json"
    code, out, _ = run(
        capsys, "tune", *BLOCK, "--level", "quick", "--grad", "--out", str(out_file)
    )
    assert code == 0
    assert "attention forward q float32" in out
    assert "rms_norm forward_and_vjp x float32" in out
    assert "✓ chosen" in out
    tuned = rewriter.Tuned.load(out_file)
    assert {k.op for k, _ in tuned.entries} == {"attention", "rms_norm"}
    code, out, _ = run(capsys, "explain", *BLOCK, "--tuned", str(out_file), "--json")
    assert {s["origin"] for s in json.loads(out)["sites"]} == {"tuned"}
    code, out, _ = run(capsys, "explain", *BLOCK, "--json")
    assert {s["origin"] for s in json.loads(out)["sites"]} == {"cached"}
    code, out, _ = run(capsys, "cache", "info", "--json")
    assert {tuple(k): n for k, n in json.loads(out)["counts"]} == {
        ("cpu", "attention"): 2, ("cpu", "rms_norm"): 2,
    }  # fmt: skip
    assert run(capsys, "cache", "path")[1].strip() == str(tmp_path / "cache")
    code, out, _ = run(capsys, "cache", "clear", "--op", "attention")
    assert out.startswith("removed ")
    assert dict(cache.info().counts) == {("cpu", "rms_norm"): 2}
    code, _, err = run(capsys, "tune", *BLOCK, "--level", "slow")
    assert code == 2
    assert "Choose quick, full" in err
    code, _, err = run(capsys, "explain", *BLOCK, "--tuned", str(tmp_path / "none"))
    assert code == 2
    assert "cannot be read: No such file" in err
    cache._process.cache_clear()
