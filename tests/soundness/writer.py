"""Writes the lines of a random program and its arguments, for all grammars."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.soundness.program import Argument, Program

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("float32", "bfloat16", "float16")


class Writer:
    """Writes one program, line by line.

    Attributes:
        draw: Where all choices come from.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.draw = random.Random(f"{kind} {seed}")
        self._kind, self._seed = kind, seed
        self._lines: list[str] = []
        self._arguments: list[Argument] = []
        self._names: set[str] = set()

    def one(self, options: Sequence[Any]) -> Any:
        """One of several."""
        return self.draw.choice(options)

    def mostly(self, usual: Any, options: Sequence[Any], share: float = 0.6) -> Any:
        """The usual one, or else one of several."""
        return usual if self.chance(share) else self.one(options)

    def usually(
        self, usual: Sequence[str], odd: Sequence[str], share: float = 0.15
    ) -> str:
        """One of the usual ones, or an odd one as often as that."""
        return self.one(odd if self.chance(share) else usual)

    def branch(self, *options: Callable[[], Any]) -> Any:
        """What one of several gives; the others write nothing."""
        return self.one(options)()

    def chance(self, share: float) -> bool:
        """True as often as that."""
        return self.draw.random() < share

    def let(self, text: str, name: str = "x") -> str:
        """The name of a value, which is written down."""
        name = self._new(name)
        self._lines.append(f"{name} = {text}")
        return name

    def argument(
        self,
        name: str,
        shape: Sequence[int],
        values: str,
        dtype: str = "float32",
        *,
        operand: bool = False,
    ) -> str:
        """The name of a new argument."""
        name = self._new(name)
        given = Argument(name, tuple(shape), dtype, values, operand)
        self._arguments.append(given)
        return name

    def _new(self, name: str) -> str:
        """A name that nothing has yet."""
        numbers = itertools.chain([""], itertools.count(1))
        new = next(n for i in numbers if (n := f"{name}{i}") not in self._names)
        self._names.add(new)
        return new

    def program(self, result: str, *, entries: bool = False) -> Program:
        """The program that returns a value."""
        lines = (*self._lines, f"return {result}")
        return Program(self._kind, self._seed, lines, tuple(self._arguments), entries)


def literal(number: float, dtype: str) -> str:
    """A number of a dtype, as text."""
    text = repr(min(number, 65504.0) if dtype == "float16" else number)
    if text.strip("-") in ("inf", "nan"):
        text = f'float("{text}")'
    return f"jnp.{dtype}({text})"
