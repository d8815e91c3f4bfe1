"""What ``require=`` counts: sites that a kernel replaces, or that are recognised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.config import resolve
from rewriter.errors import ConfigError, RequirementNotMet
from rewriter.support.requirement import Requirement, written
from tests.support.programs import FORCED, block

pytestmark = pytest.mark.once

PARAMS = {"scale": np.ones(8, "f4"), "qkv": np.ones((8, 24), "f4")}
ARGS = PARAMS, np.ones((2, 16, 8), "f4")


def met(require, **options):
    rewriter.explain(block, require=require, **options)(*ARGS)


@pytest.mark.parametrize(
    "require",
    [
        "attention",
        "all",
        {"attention": 1},
        {"attention": 1, "rms_norm": 1},
        {"attention": {"found": 1, "replaced": 1}},
        (("attention", 1),),
        {"layer_norm": 0},
    ],
)
def test_what_kernels_replace_is_met(require):
    met(require, implementation=FORCED)


LEFT = [
    ("attention", "attention: 0 of 1 replaced by a kernel, 1 found"),
    ("all", "2 left to XLA"),
    ({"attention": 1}, "attention: 0 of 1 replaced by a kernel, 1 found"),
    (
        {"attention": {"found": 2, "replaced": 1}},
        "attention: 0 of 1 replaced by a kernel, 1 of 2 found",
    ),
    ({"attention": {"found": 2}}, "attention: 1 of 2 found"),
    (
        {"attention": 1, "rms_norm": 3},
        "1 found; rms_norm: 0 of 3 replaced by a kernel, 1 found",
    ),
]


@pytest.mark.parametrize(("require", "text"), LEFT)
def test_what_is_left_to_xla_is_not_met(require, text):
    xla = {"attention": "xla", "rms_norm": "xla"}
    with pytest.raises(RequirementNotMet) as caught:
        met(require, implementation=xla)
    assert f"block: require={written(resolve({'require': require}).require)}: " in str(
        caught.value
    )
    assert text in str(caught.value)


def test_the_error_says_why_and_what_to_do():
    with pytest.raises(RequirementNotMet) as caught:
        met("attention", implementation={"attention": "xla"})
    text = str(caught.value)
    assert text.startswith("block: require={'attention': 1}: attention: 0 of 1 ")
    assert "= attention  ×1  programs.py:" in text  # the row of the report
    assert "rms_norm" not in text
    assert "require {'attention': {'found': 1}}; implementation= forces" in text
    met({"attention": {"found": 1}}, implementation={"attention": "xla"})
    with pytest.raises(RequirementNotMet, match="shows what is found") as caught:
        met("layer_norm")
    assert "nothing in block is close to layer_norm" in str(caught.value)
    with pytest.raises(RequirementNotMet, match=r"why_not\('rms_norm'\)"):
        met({"rms_norm": {"found": 99}})


def test_turns_of_a_loop_count():
    def model(params, x):
        return jax.lax.scan(lambda c, _: (block(params, c), None), x, None, length=3)[0]

    explain = rewriter.explain(model, require={"attention": 3}, implementation=FORCED)
    explain(*ARGS)
    forced = {**FORCED, "attention": "xla"}
    with pytest.raises(RequirementNotMet, match="0 of 3 replaced by a kernel, 3 found"):
        rewriter.explain(model, require={"attention": 3}, implementation=forced)(*ARGS)


def test_a_compiled_function_fails_too():
    fast = rewriter.optimize(block, require="attention", implementation=FORCED)
    assert jnp.isfinite(fast(*ARGS)).all()
    left = rewriter.optimize(block, require="attention", patterns="-attention")
    with pytest.raises(RequirementNotMet, match="attention: 0 of 1"):
        left(*ARGS)


@pytest.mark.parametrize(
    "value",
    [
        3,
        1.5,
        {"attention": "two"},
        {"attention": -1},
        {"attention": True},
        {"attention": {}},
        {"attention": {"kept": 1}},
        {"attention": {"found": "x"}},
        {3: 1},
        ["attention"],
    ],
)
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError) as caught:
        resolve({"require": value})
    assert f"require={value!r}; expected an op's name, 'all', or a dict" in str(
        caught.value
    )


def test_values_become_records():
    found = resolve({"require": {"b": 2, "a": {"found": 1}}}).require
    assert found == (Requirement("a", found=1), Requirement("b", replaced=2))
    assert written(found) == "{'a': {'found': 1}, 'b': 2}"
    assert resolve({"require": found}).require == found
    assert resolve({"require": None}).require is None
    hash(found)
