"""The function and arguments that a command line names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

import rewriter
from rewriter.__main__ import BAD, GOOD, MISTAKE, main
from rewriter.errors import ConfigError
from rewriter.tools.targets import function_and_arguments, parsed, user_path

pytestmark = pytest.mark.once

SOURCE = """
import helper_beside
import jax.numpy as jnp
import numpy as np

def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + helper_beside.EPS)

def other(x, y):
    return x + y

def alone():
    return jnp.ones(3)

class Model:
    @staticmethod
    def step(x):
        return x

norm_args = (np.ones((4, 8), "f4"),)

def example_args():
    return np.ones(2), np.ones(2)

single = np.ones(3)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_beside.py").write_text("EPS = 1e-6\n")
    path = tmp_path / f"model_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(SOURCE)
    with user_path():
        yield str(path)
    sys.modules.pop("helper_beside", None)


def shapes(values):
    return [v.shape for v in values]


@pytest.mark.parametrize(
    ("name", "args", "want", "found"),
    [
        ("norm", None, [(4, 8)], "norm_args"),
        ("other", None, [(2,), (2,)], "example_args"),
        ("Model.step", None, [(2,), (2,)], "example_args"),
        ("alone", None, [], ""),
        ("norm", "single", [(3,)], ""),
        ("other", "example_args", [(2,), (2,)], ""),
        ("norm", "{file}:norm_args", [(4, 8)], ""),
    ],
)
def test_arguments(file, name, args, want, found):
    args = args and args.format(file=file)
    fn, values, place = function_and_arguments(f"{file}:{name}", args)
    assert callable(fn)
    assert shapes(values) == want
    assert place == (f"{file}:{found}" if found else "")


@pytest.mark.parametrize(
    ("text", "args", "words"),
    [
        ("{file}", None, "expected module:name or file.py:name"),
        ("{file}:nrm", None, "Did you mean 'norm'"),
        ("{file}:norm", "nrm_args", "Did you mean 'norm_args'"),
        ("nowhere.py:norm", None, "cannot import 'nowhere.py'"),
        ("json:dumps", None, "json has none of dumps_args, example_args, args"),
    ],
)
def test_mistakes(file, text, args, words):
    with pytest.raises(ConfigError) as caught:
        function_and_arguments(text.format(file=file), args)
    assert words in str(caught.value)


def test_a_file_runs_once_and_the_search_path_comes_back(file):
    first, _, _ = function_and_arguments(f"{file}:norm")
    again, _, _ = function_and_arguments(f"{file}:norm")
    assert first is again
    before = list(sys.path)
    main(["explain", f"{file}:norm", "--json"])
    assert sys.path == before


def test_a_file_that_fails_leaves_no_module(tmp_path):
    path = tmp_path / "half_made.py"
    path.write_text("raise ValueError('no')")
    with user_path(), pytest.raises(ValueError, match="no"):
        function_and_arguments(f"{path}:f")
    assert "half_made" not in sys.modules


def test_names_with_colons():
    assert parsed(r"C:\me\train.py:fn") == (r"C:\me\train.py", "fn")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ([], GOOD, "norm_args"),
        (["--require", "rms_norm.found=1"], GOOD, ""),
        (["--require", "attention"], BAD, "RequirementNotMet"),
        (["--require", "atention"], MISTAKE, "Did you mean 'attention'"),
        (["--patterns", "nothing"], MISTAKE, "UnknownPattern"),
        (["--target", "abacus"], MISTAKE, "abacus"),
        (["--args", "missing"], MISTAKE, "has no 'missing'"),
        (["--html", "/nowhere/page.html"], MISTAKE, "--html /nowhere/page.html: No"),
    ],
)
def test_exit_statuses(file, capsys, options, status, words):
    assert main(["explain", f"{file}:norm", *options]) == status
    out = capsys.readouterr()
    assert words in out.out + out.err


def test_a_command_line_that_cannot_be_parsed(file, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", f"{file}:norm", "--no-such-option"])
    assert caught.value.code == MISTAKE
    assert "unrecognized arguments" in capsys.readouterr().err


def test_the_page_is_named(file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", f"{file}:norm", "--html", "page.html"]) == GOOD
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().out
    assert main(["explain", f"{file}:norm", "--html", "page.html", "--json"]) == GOOD
    data = json.loads(capsys.readouterr().out)
    assert data["html"] == str(tmp_path / "page.html")


def test_two_reports(file, capsys, tmp_path):
    paths = []
    for name, options in (("a", []), ("b", []), ("c", ["--patterns=none"])):
        paths.append(tmp_path / f"{name}.json")
        assert main(["explain", f"{file}:norm", "--json", *options]) == GOOD
        paths[-1].write_text(capsys.readouterr().out)
    first, same, none = map(str, paths)
    assert main(["diff", first, same]) == GOOD
    assert "both reports say the same" in capsys.readouterr().out
    assert main(["diff", first, none]) == BAD
    assert " - site: rms_norm ×1" in capsys.readouterr().out
    assert main(["diff", first, none, "--json"]) == BAD
    assert len(json.loads(capsys.readouterr().out)["lost"]) == 1
    other = tmp_path / "other.json"
    for text, words in (("{}", "holds something else"), ("no", "Expecting value")):
        other.write_text(text)
        assert main(["diff", first, str(other)]) == MISTAKE
        assert words in capsys.readouterr().err
    assert main(["diff", first, str(tmp_path / "gone.json")]) == MISTAKE


def test_from_a_shell(file):
    command = [sys.executable, "-m", "rewriter", "explain", f"{file}:norm"]
    done = subprocess.run(
        [*command, "--require", "attention"], capture_output=True, text=True
    )
    assert done.returncode == BAD
    assert "attention: 0 of 1" in done.stderr


def test_a_file_alone_is_answered_with_its_functions(file, capsys):
    assert main(["explain", str(file)]) == MISTAKE
    said = capsys.readouterr().err
    assert f"Try {file}:norm" in said
    assert f"--all {file}" in said


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == GOOD
    assert capsys.readouterr().out == f"rewriter {rewriter.__version__}\n"


@pytest.mark.parametrize(
    ("package", "argv", "extra"),
    [
        ("flax", ["demo", "--small"], "demo"),
        ("matplotlib", ["bench", "--op", "rms_norm", "--plot", "roof.svg"], "plot"),
    ],
)
def test_a_plain_install_says_what_to_install(
    monkeypatch, capsys, package, argv, extra
):
    find = importlib.util.find_spec
    absent = lambda name, *rest: None if name == package else find(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert main(argv) == MISTAKE
    said = capsys.readouterr().err
    assert f"{package} is not installed" in said
    assert f'pip install "jaxpr-rewriter[{extra}]"' in said
