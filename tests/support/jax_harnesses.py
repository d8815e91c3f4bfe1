"""Compares the programs of JAX's own harnesses under `rewriter.optimize` and `jax.jit`.

    python3 -m tests.support.jax_harnesses [--part 1/40] [-k WORDS]

The package jax ships some 5000 small functions with arguments, which cover all its
primitives. Each is lowered both ways. Where nothing is replaced, the text of both must
be the same. Prints those that differ, and exits with 1 if there are some.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import jax
import numpy as np
from jax._src.internal_test_util import test_harnesses  # noqa: TID251 (JAX's tests)

import rewriter


def outcome(fn: Any, args: Any) -> str:
    """The text of a lowered program, or the name of the error."""
    try:
        return fn.lower(*args).as_text()
    except Exception as error:
        return type(error).__name__


def difference(harness: Any) -> str | None:
    """How both ways differ, ``""`` if they do not; None if a site is replaced."""
    args = harness.dyn_args_maker(np.random.RandomState(0))
    plain = outcome(jax.jit(harness.dyn_fun), args)
    fast = rewriter.optimize(harness.dyn_fun)
    ours = outcome(fast, args)
    if plain == ours:
        return ""
    if "\n" in plain and any(s.replaced for s in fast.report(*args).sites):
        return None
    first = zip(plain.splitlines(), ours.splitlines(), strict=False)
    return next((f"{a.strip()}  is  {b.strip()}" for a, b in first if a != b), "longer")


def main() -> None:
    """Compares the harnesses, or a part of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="such as 1/40")
    parser.add_argument("-k", default="", dest="words", help="in the harness's name")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    warnings.simplefilter("ignore")
    same, replaced, wrong = 0, 0, 0
    for harness in test_harnesses.all_harnesses[part::parts]:
        if given.words not in harness.fullname:
            continue
        with jax.enable_x64(np.dtype(harness.dtype).itemsize == 8):
            found = difference(harness)
        same, replaced = same + (found == ""), replaced + (found is None)
        if found:
            wrong += 1
            print(f"{harness.fullname}: {found}", flush=True)
    print(f"{same} the same, {replaced} with sites, {wrong} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
