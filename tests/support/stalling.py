"""A program that is tuned until one of its kernels stalls: run as a process."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp

import rewriter
from tests.support.crashing import calling, program

FIRST, SECOND = 3, 5
"""Rows of the sites: one is measured, at the other the kernel stalls."""


@rewriter.pattern(dims="x: m k, w: k n -> m n")
def gated(x, w):
    return jnp.sin(x @ w) * (x @ w)


def stall() -> None:
    mark = pathlib.Path(os.environ["STALLED"])
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)
    time.sleep(3600)


@gated.kernel()
def stalls(x, w):
    if x.shape[0] != SECOND:
        return program(x, w)
    if os.environ["WHERE"] == "compiling":
        stall()
    return calling(stall, x, w)


def both(x, w):
    return [program(x[:n], w) for n in (FIRST, SECOND)]


def operands(rows: int) -> tuple[jax.Array, jax.Array]:
    return jnp.ones((rows, 32)) * 0.01, jnp.ones((32, 48)) * 0.1


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x, w = operands(8)
    isolated = os.environ["WHERE"] == "isolated"
    try:
        if os.environ["WHERE"] == "tracing":
            os.environ["WHERE"] = "compiling"
            jax.block_until_ready(
                rewriter.optimize(both, patterns=[gated], tune="quick")(x, w)
            )
        else:
            tune = rewriter.tune(both, patterns=[gated], isolate=isolated)
            tune(x, w)
    except KeyboardInterrupt:
        took = time.time() - float(sys.stdin.readline())
        print("interrupted after", took, flush=True)
        raise
