"""Numbers of four bits that are packed by two in a byte, or by eight in a word.

A byte has two halves of four bits, the low and the high one. A matrix [k, n] may be
packed along either axis: two numbers in a byte then follow each other ("turns"), or lie
half an axis apart ("halves")::

    turns     bytes[i] has numbers 2 i and 2 i + 1
    halves    bytes[i] has numbers i and i + k/2

A word of 32 bits has eight numbers of an axis that follow each other, at places of four
bits that are counted from the lowest::

    words     words[i] has number 8 i + j at its place p[j]
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

WORDS, EACH = "words", 8
"""The order of numbers in words, and how many a word has."""


@dataclass(frozen=True)
class Packing:
    """The order of numbers in bytes or words.

    Attributes:
        axis: ``"k"`` or ``"n"``.
        order: ``"turns"``, ``"halves"`` or ``"words"``.
        first: The half of the first of two numbers, ``"low"`` or ``"high"``. Of words,
            the place of each of eight numbers, as ``"01234567"``.
        sign: ``"signed"`` if numbers are -8 to 7, ``"unsigned"`` if 0 to 15.
        dtype: What they are unpacked to, ``"int8"`` or ``"uint8"``.
    """

    axis: str
    order: str
    first: str
    sign: str
    dtype: str

    @property
    def count(self) -> int:
        """The numbers of a byte or word."""
        return EACH if self.order == WORDS else 2

    def __str__(self) -> str:
        return " ".join(getattr(self, f.name) for f in dataclasses.fields(self))


def packing_of(text: str) -> Packing:
    """Returns a packing from its text, as the parameter of an op has it.

    Example:
        >>> packing_of("k turns low signed int8").first
        'low'
    """
    return Packing(*text.split())


def halves(x: jax.Array, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the low and the high numbers of bytes, int8 or uint8.

    Example:
        >>> [int(half[0]) for half in halves(jnp.array([0x9F], "uint8"), True)]
        [-1, -7]
    """
    if signed:
        x = x.astype(jnp.int8)
        return (x << 4) >> 4, x >> 4
    x = x.astype(jnp.uint8)
    return x & 15, x >> 4


def unpacked(x: jax.Array, packing: Packing, axis: int) -> jax.Array:
    """Returns the numbers of bytes or words.

    Args:
        x: The bytes, int8 or uint8; or the words, int32 or uint32.
        packing: How numbers lie in them.
        axis: The axis along which they are packed.

    Example:
        >>> packing = packing_of("k turns low unsigned uint8")
        >>> unpacked(jnp.array([[0x21], [0x43]], "uint8"), packing, 0)[:, 0].tolist()
        [1, 2, 3, 4]
    """
    if packing.order == WORDS:
        return _of_words(x, packing, axis)
    parts = [half.astype(packing.dtype) for half in halves(x, packing.sign == "signed")]
    parts = parts if packing.first == "low" else parts[::-1]
    if packing.order == "halves":
        return jnp.concatenate(parts, axis)
    shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    return jnp.stack(parts, axis + 1).reshape(shape)


def _of_words(x: jax.Array, packing: Packing, axis: int) -> jax.Array:
    """The numbers of words."""
    places = jnp.array([4 * int(place) for place in packing.first], jnp.uint32)
    words = jnp.expand_dims(lax.bitcast_convert_type(x, jnp.uint32), axis + 1)
    numbers = (words >> places.reshape(EACH, *[1] * (x.ndim - axis - 1))) & 15
    numbers = numbers.astype(packing.dtype)
    if packing.sign == "signed":
        numbers = (numbers ^ 8) - 8
    return numbers.reshape(*x.shape[:axis], EACH * x.shape[axis], *x.shape[axis + 1 :])
