"""What is chosen for attention of few scores, and for gradients of narrow norms.

  python3 -m tests.bench.small_choices [--seconds N] [--json PATH]

What is measured is that of `tests.bench.choices`.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench.choices import BF16, CAUSAL, Row, all_measured, attending, norming

PEER = functools.partial(attending, forced=("cudnn",))
ALONE = functools.partial(attending, forced=())


def of_attention() -> Iterator[Row]:
    """Rows of 0.2 to 48 MiB of scores, of short sequences, and of few heads of keys."""
    lengths = lambda b: (((b,), jnp.int32),)
    bias = lambda n, t: (((1, n, t, t), BF16),)
    yield PEER("0.2 MiB full 1x64x12x64", 1, 64, 64, 12, 12, 64)
    yield PEER("0.75 MiB causal 1x128x12x64", 1, 128, 128, 12, 12, 64, window=CAUSAL)
    yield PEER("3.1 MiB causal 8x80x16x128", 8, 80, 80, 16, 16, 128, window=CAUSAL)
    yield ALONE("1.5 MiB lengths 2x128x12x64", 2, 128, 128, 12, 12, 64, more=lengths(2))
    yield PEER("3 MiB full 1x256x12x64", 1, 256, 256, 12, 12, 64)
    yield PEER("12 MiB causal 1x512x12x128", 1, 512, 512, 12, 12, 128, window=CAUSAL)
    yield ALONE("3 MiB bias 1x256x12x64", 1, 256, 256, 12, 12, 64, more=bias(12, 256))
    yield PEER("48 MiB full 1x882x16/4x128", 1, 882, 882, 16, 4, 128)
    yield PEER("causal 1x2506x24/3x128", 1, 2506, 2506, 24, 3, 128, window=CAUSAL)
    yield ALONE(
        "CLIP text 256x77x8x64 causal, lengths", 256, 77, 77, 8, 8, 64, window=CAUSAL,
        more=lengths(256),
    )  # fmt: skip
    yield ALONE("Swin 4096x49x6x32", 4096, 49, 49, 6, 6, 32, more=bias(6, 49))
    yield PEER("CLIP vision 256x50x12x64", 256, 50, 50, 12, 12, 64)


def of_few_tiles() -> Iterator[Row]:
    """Rows with fewer tiles of queries than the device has processors."""
    for b, t, s, n, h, causal in (
        (16, 158, 158, 2, 48, True), (1, 185, 2293, 4, 80, False),
        (1, 200, 1024, 8, 64, False), (8, 200, 200, 4, 64, True),
        (16, 158, 158, 2, 64, False), (2, 128, 2048, 4, 128, False),
        (1, 700, 700, 6, 64, True), (4, 257, 257, 4, 80, False),
        (2, 512, 512, 8, 64, True), (1, 1500, 1500, 2, 64, False),
        (8, 150, 300, 4, 64, False), (1, 2000, 2000, 4, 128, True),
    ):  # fmt: skip
        kind = "causal" if causal else "full"
        name = f"{kind} {b}x{t}{f'x{s}' * (s != t)}x{n}x{h}"
        window = CAUSAL if causal else (None, None)
        yield attending(
            name, b, t, s, n, n, h, window=window, forced=("hopper", "cudnn")
        )


def windows(x: Any, weights: Any, table: Any) -> Any:
    """Swin's shifted windows: a bias of 6 heads, and a mask of each of 64 windows."""
    b, t, d = x.shape
    q, k, v = jnp.moveaxis((x @ weights).reshape(b, t, 3, 6, 32), 2, 0)
    s = jnp.einsum("btnh,bsnh->bnts", q * 32**-0.5, k) + table
    at = np.arange(56)
    part = (at >= 49).astype(int) + (at >= 53)
    area = (part[:, None] * 3 + part).reshape(8, 7, 8, 7).swapaxes(1, 2)
    area = area.reshape(64, 49)
    mask = np.where(area[:, :, None] == area[:, None, :], 0.0, -100.0)
    s = s.reshape(b // 64, 64, 6, t, t) + jnp.asarray(mask, s.dtype)[:, None]
    w = jax.nn.softmax(s.reshape(b, 6, t, t).astype(jnp.float32), -1)
    return jnp.einsum("bnts,bsnh->btnh", w.astype(v.dtype), v).reshape(b, t, d)


def of_windows() -> Iterator[Row]:
    """Swin's shifted windows, behind the product that gives q, k and v."""
    given = (((4096, 49, 192), BF16), ((192, 576), BF16), ((1, 6, 49, 49), BF16))
    scores = 4.0 * 4096 * 6 * 49 * 49
    yield Row("Swin shifted 4096x49x6x32", "attention", windows, given, (),
              scores=scores)  # fmt: skip


def of_norms() -> Iterator[Row]:
    """Norms of 64 to 256 columns, with gradients."""
    for kind, rows, columns in (
        ("layer", 262144, 128), ("layer", 200704, 96), ("rms", 262144, 128),
        ("layer", 50176, 192), ("rms", 100352, 192), ("layer", 100001, 64),
    ):  # fmt: skip
        yield replace(norming(kind, rows, columns, BF16), passes=("both",))


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = (*of_attention(), *of_few_tiles(), *of_windows(), *of_norms())
    command = "python3 -m tests.bench.small_choices"
    all_measured(rows, given.seconds, given.json, command)


if __name__ == "__main__":
    main()
