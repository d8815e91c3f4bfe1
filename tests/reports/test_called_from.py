"""The user's own line beside that of a library it calls."""

from __future__ import annotations

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter import errors
from rewriter.reports.rows import site_lines
from tests.reports.test_report import site

pytestmark = pytest.mark.once

SOURCE = """
import jax, jax.numpy as jnp

def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

def twice(x):
    return norm(norm(x))

@jax.jit
def jitted(x):
    return norm(x) + 1

def near(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / (x.std(-1, keepdims=True) + 1e-6)
"""


def library(source=SOURCE, file="/env/lib/site-packages/lib/norms.py"):
    """The names of a module that seems to be an installed one."""
    names: dict[str, object] = {}
    exec(compile(source, file, "exec"), names)
    return names


LIB = library()
X = np.ones((4, 8), "f4")


def line(fn, offset=1):
    """A line of a function, as reports have it."""
    _, first = inspect.getsourcelines(fn)
    return f"test_called_from.py:{first + offset} ({fn.__qualname__})"


def callers(fn):
    return [s.called_from for s in rewriter.explain(fn)(X).sites]


def users(x):
    return LIB["norm"](x)


def two_calls(x):
    y = LIB["norm"](x)
    return LIB["norm"](y + 1)


def one_call_of_two(x):
    return LIB["twice"](x)


def through_jit(x):
    return LIB["jitted"](x)


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: LIB["norm"](x), x)


def differentiated(x):
    return jax.grad(lambda x: LIB["norm"](x).sum())(x)


def own(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("fn", "offsets"),
    [
        (users, [1]),
        (two_calls, [1, 2]),
        (one_call_of_two, [1, 1]),
        (through_jit, [1]),
        (in_a_loop, [1]),
        (differentiated, [1]),
    ],
)
def test_the_line_that_calls_the_library(fn, offsets):
    report = rewriter.explain(fn)(X)
    got = [s.called_from.split(" ")[0] for s in report.sites]
    assert got == [line(fn, n).split(" ")[0] for n in offsets]
    assert {s.where for s in report.sites} == {"norms.py:5 (norm)"}


def test_a_line_of_the_users_own_is_not_said_twice():
    (site,) = rewriter.explain(own)(X).sites
    assert (site.where, site.called_from) == (line(own), "")
    assert "from test_called" not in str(rewriter.explain(own)(X))


def test_nothing_of_the_users_is_known():
    (site,) = rewriter.explain(LIB["norm"])(X).sites
    assert site.where == "norms.py:5 (norm)"
    assert not site.called_from or site.called_from.startswith("test_called_from.py")


def test_text_json_and_at():
    report = rewriter.explain(two_calls)(X)
    first, second = line(two_calls), line(two_calls, 2)
    rows = str(report).splitlines()
    assert f"     from {first} ×1, {second} ×1" in rows
    assert sum("rms_norm" in row for row in rows) == 1  # one row for both
    assert json.loads(report.json())["sites"][0]["called_from"] == first
    assert len(report.at(first.split(" ")[0]).sites) == 1
    assert len(report.at("test_called_from.py").sites) == 2
    assert len(report.at("norms.py:5").sites) == 2


def test_many_lines_are_not_all_shown():
    sites = [site(i, called_from=f"model.py:{i} (f)") for i in range(9)]
    (row, below, *_) = site_lines(sites)
    lines = ", ".join(f"model.py:{i} (f) ×1" for i in range(3))
    assert "×9" in row
    assert below == f"     from {lines}, 6 other lines"


def test_near_misses_too():
    def user(x):
        return LIB["near"](x)

    report = rewriter.explain(user)(X)
    (miss,) = report.misses
    assert miss.where.startswith("norms.py:")
    assert miss.called_from.startswith("test_called_from.py:")
    assert f"     from {miss.called_from}" in str(report).splitlines()


def test_layers_that_are_analysed_as_a_few_of_them():
    def model(x):
        for _ in range(150):
            x = LIB["norm"](x) + 1
        for _ in range(3):
            x = LIB["norm"](x) - 1
        return x

    assert set(callers(model)) == {
        line(model, 2).replace("(" + model.__qualname__, "(" + short(model)),
        line(model, 4).replace("(" + model.__qualname__, "(" + short(model)),
    }


def short(fn):
    return fn.__qualname__.split(".<locals>")[0]


@pytest.mark.parametrize(
    ("file", "own_file"),
    [
        ("/home/me/train.py", True),
        ("/home/me/.venv/lib/python3.12/site-packages/flax/nn.py", False),
        ("/usr/lib/python3/dist-packages/flax/nn.py", False),
        (errors.__file__, False),
        (inspect.__file__, False),
        ("<string>", False),
        ("<stdin>", True),
    ],
)
def test_whose_file_it_is(file, own_file):
    assert errors.is_users_own(file) is own_file
