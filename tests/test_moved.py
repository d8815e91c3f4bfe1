"""Import paths of version 0.1 resolve to the modules of today."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import rewriter
from rewriter._moved import moved


@pytest.mark.parametrize("old", moved())
def test_an_old_path_is_the_module_of_the_new_one(old):
    new = importlib.import_module(f"rewriter.{moved()[old]}")
    assert importlib.import_module(f"rewriter.{old}") is new
    assert new.__spec__.name == f"rewriter.{moved()[old]}"


def test_modules_of_packages_that_moved_are_the_same():
    old = importlib.import_module("rewriter.normal_form.boolean")
    assert old is importlib.import_module("rewriter.algebra.normal_form.boolean")


def test_public_functions_are_not_hidden_by_modules_of_their_names():
    for name in ("optimize", "tune", "verify", "export", "pattern"):
        assert callable(importlib.import_module("rewriter").__dict__[name])
        importlib.import_module(f"rewriter.{name}")
        assert callable(getattr(rewriter, name)), name


def test_old_paths_work_in_a_fresh_process():
    code = (
        "from rewriter.kernel import Kernel; from rewriter.pattern import Pattern\n"
        "from rewriter.verdict import YES; import rewriter.registry, rewriter\n"
        "assert Pattern is rewriter.Pattern\n"
        "assert Kernel.__module__ == 'rewriter.ops.kernel'\n"
        "assert rewriter.registry.registry().op('attention')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False)
    assert done.returncode == 0


def test_old_paths_leave_modules_of_their_last_name_alone():
    """Two modules had one name, below packages that are one package now."""
    from rewriter.kernels.ragged import dot

    new = importlib.import_module("rewriter.kernels.ragged.dot.hopper")
    old = importlib.import_module("rewriter.kernels.ragged.quantized_dot.hopper")
    assert old is not new
    assert dot.hopper is new
