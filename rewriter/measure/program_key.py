"""The key under which a whole program is measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax

from rewriter.measure.key import PROGRAM, WHOLE, Key
from rewriter.measure.serialized import key_json

REWRITTEN, WITHOUT = "rewritten", "without "
"""Implementations of whole programs: with every site replaced, or without one op."""


def program_key(
    sites: Iterable[tuple[Key, str]], inputs: Iterable[Any], device: str
) -> Key:
    """Returns the key of a whole program: its inputs, and its sites with the choices.

    Args:
        sites: (key, chosen implementation in words) for every site.
        inputs: The program's input types.
        device: The device kind.
    """
    texts = sorted(json.dumps([key_json(k), name]) for k, name in sites)
    whole = json.dumps([texts, [str(i) for i in inputs]])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    params = (("digest", digest),)
    return Key(PROGRAM, WHOLE, (), (), params, device, precision or "")
