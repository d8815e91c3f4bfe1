"""Assertions for the tests of a program that uses the package."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import rewriter
from rewriter.errors import UnknownPattern
from rewriter.testing import assert_rewrites
from tests.support.programs import FORCED, block

pytestmark = pytest.mark.once

PARAMS = {"scale": np.ones(8, "f4"), "qkv": np.ones((8, 24), "f4")}
X = jax.ShapeDtypeStruct((2, 16, 8), "f4")
OPTIONS = {"implementation": FORCED}


def test_what_is_replaced():
    report = assert_rewrites(block, PARAMS, X, options=OPTIONS, attention=1, rms_norm=1)
    assert report.counts(replaced=True)["attention"] == 1
    assert_rewrites(block, PARAMS, X, attention={"found": 1})
    assert_rewrites(block, PARAMS, kwargs={"x": X}, options=OPTIONS, attention=1)
    assert_rewrites(rewriter.optimize(block, **OPTIONS), PARAMS, X, attention=1)
    assert not assert_rewrites(lambda x: x, X).sites


def test_what_is_not():
    left = {"implementation": {"attention": "xla"}}
    with pytest.raises(AssertionError) as caught:
        assert_rewrites(block, PARAMS, X, options=left, attention=1)
    assert "attention: 0 of 1 replaced by a kernel, 1 found" in str(caught.value)
    assert " = attention  ×1  programs.py:" in str(caught.value)
    with pytest.raises(AssertionError, match="attention: 1 of 2 replaced"):
        assert_rewrites(block, PARAMS, X, options=OPTIONS, attention=2)
    with pytest.raises(UnknownPattern, match="Did you mean 'attention'"):
        assert_rewrites(block, PARAMS, X, atention=1)
