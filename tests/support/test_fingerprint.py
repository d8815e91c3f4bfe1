"""Texts of plain values: equal values have one, others differ or have none."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.norms import hopper, hopper_config
from rewriter.ops.kernel import Heads, takes_all
from rewriter.support import fingerprint
from rewriter.support.fingerprint import NotPlain, text_of

DIFFERENT = [
    0, 0.0, -0.0, False, None, "0", b"0", (), [], {}, (0,), [0], ((0,), 0), (0, (0,)),
    ("0",), ("(tuple 0)",), {"a": 0}, {"a": False}, frozenset({0}), float("inf"), ...,
    np.dtype("float32"), np.dtype("int32"), np.float32(0), np.float32, np.int32(0),
    jnp.dtype("bfloat16"), Heads(0, 1, 2, 3), Heads(0, 1, 2, 4), Heads, takes_all,
    functools.partial(takes_all, 1), functools.partial(takes_all, spec=1),
    functools.partial(hopper_config.proposed, 1), hopper.supports,
]  # fmt: skip


def test_different_values_have_different_texts() -> None:
    texts = [text_of(v) for v in DIFFERENT]
    assert len(set(texts)) == len(texts)


def test_equal_values_have_one_text() -> None:
    assert text_of(Heads(0, 1, 2, 3)) == text_of(Heads(0, 1, 2, 3))
    assert text_of({"b", "a"}) == text_of({"a", "b"})


def named_as_ours(function: object) -> object:
    """A function as if it were of the package."""
    function.__module__ = "rewriter.kernels.made"  # pyright: ignore
    return function


def test_functions_of_one_name_differ_by_their_code_and_what_they_close_over() -> None:
    def adding(n: int) -> object:
        return named_as_ours(lambda x: x + n)

    others = [
        named_as_ours(lambda x: x + 1), named_as_ours(lambda x: x + 2),
        named_as_ours(lambda x: x * 2), named_as_ours(lambda x, n=1: x + n),
        named_as_ours(lambda x: x.sum()), named_as_ours(lambda x: x.max()),
        named_as_ours(lambda x: (lambda y: y + 1)(x)),
        named_as_ours(lambda x: (lambda y: y + 2)(x)), adding(1), adding(2),
    ]  # fmt: skip
    assert len({text_of(f) for f in others}) == len(others)
    assert text_of(adding(1)) == text_of(adding(1))


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x, functools.partial(lambda x: x, 1), object(), np.zeros(2),
        jnp.zeros(2), {"a": [jnp.zeros(2)]}, pytest, type("Own", (), {}),
        functools.partial(takes_all, np.zeros(2)),
    ],
    ids=[
        "lambda", "partial", "object", "numpy", "jax", "inside", "module", "class",
        "array bound",
    ],
)  # fmt: skip
def test_values_that_no_text_tells_whole_have_none(value: object) -> None:
    with pytest.raises(NotPlain):
        text_of(value)


def test_a_text_is_the_same_in_another_process() -> None:
    code = (
        "from rewriter.kernels.norms import hopper\n"
        "from rewriter.support.fingerprint import text_of\n"
        "print(text_of((hopper.supports, {'b', 'a', 'c'})))"
    )
    run = [sys.executable, "-c", code]
    one = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert one.strip() == text_of((hopper.supports, {"b", "a", "c"}))


def test_the_digest_of_a_package_follows_links_and_contents(tmp_path) -> None:
    inside, linked = tmp_path / "package", tmp_path / "kernels"
    inside.mkdir()
    linked.mkdir()
    (inside / "kernels").symlink_to(linked)
    (inside / "__init__.py").write_text("")
    file = linked / "made.py"
    seen = set()
    for text in ("a = 1\n", "a = 2\n"):
        file.write_text(text)
        seen.add(fingerprint.of_folder(str(inside)))
    file.rename(linked / "other.py")
    seen.add(fingerprint.of_folder(str(inside)))
    assert len(seen) == 3


def test_files_that_changed_in_use_have_no_digest(tmp_path) -> None:
    (tmp_path / "made.py").write_text("a = 1\n")
    assert fingerprint.of_folder(str(tmp_path), time.time() + 10)
    with pytest.raises(OSError, match="changed"):
        fingerprint.of_folder(str(tmp_path), time.time() - 10)
    with pytest.raises(OSError, match="no Python files"):
        fingerprint.of_folder(str(tmp_path / "none"))
    assert fingerprint.of_package()
