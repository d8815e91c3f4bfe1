"""The pieces of spellings of norms: letters of axes, and what collects them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

from tests.spellings.spelling import collect

RMS, rms_spelling = collect("rms_norm")
LAYER, layer_spelling = collect("layer_norm")

B, T, N, D, H, W = 2, 5, 3, 16, 4, 6
EPS = 1e-5
X = dict(x="btd")
XS = dict(x="btd", scale="d")
XB = dict(x="btd", bias="d")
XSB = dict(x="btd", scale="d", bias="d")


def rms(name, inputs=XS, operands=None, **more):
    return rms_spelling(
        f"rms/{name}",
        inputs=inputs,
        operands=" ".join(inputs) if operands is None else operands,
        **{"eps": EPS, **({"out": "btd"} if "read" not in more else {}), **more},
    )


def layer(name, inputs=XSB, operands=None, **more):
    return layer_spelling(
        f"layer/{name}",
        inputs=inputs,
        operands=" ".join(inputs) if operands is None else operands,
        **{"eps": EPS, **({"out": "btd"} if "read" not in more else {}), **more},
    )
