"""A program as text with arguments; what to run, to print and to give it come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROUNDED = ".astype(jnp.bfloat16).astype(jnp.float32)"
"""How programs round an operand, other than by its dtype."""

NARROW = {"bfloat16": ".astype(jnp.bfloat16)", "float16": ".astype(jnp.float16)"}
"""How those of `NARROWED` round what they go on with, the coarsest first."""

NARROWED = ("loss", "quantized", "cache", "layer")
"""Kinds in which nothing is cast that only masks read."""


@dataclass(frozen=True)
class Argument:
    """One argument of a program.

    Attributes:
        name: What the text calls it.
        shape: Its shape.
        dtype: Its dtype's name.
        values: Which values it has, a name of `values.RECIPES`.
        operand: Whether programs are differentiated by it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: str
    operand: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)} {self.values}"


@dataclass(frozen=True)
class Program:
    """A program, written by the grammar of a kind from a seed.

    Attributes:
        kind: The grammar that wrote it.
        seed: What it was drawn from.
        lines: The body, the last of which returns one array.
        arguments: What it takes.
        entries: Whether each entry of the result counts for itself, as those of
            attention's weights do, and not by the largest of its row.
        around: Lines behind the function `f`, which call it in other ways.
    """

    kind: str
    seed: int
    lines: tuple[str, ...]
    arguments: tuple[Argument, ...]
    entries: bool = False
    around: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file in reports."""
        return f"{self.kind}_{self.seed}.py"

    @property
    def text(self) -> str:
        """What a reader sees, which runs as it is."""
        names = ", ".join(a.name for a in self.arguments)
        given = [f"# {a}" for a in self.arguments]
        body = (f"    {line}" for line in self.lines)
        return "\n".join([*given, f"def f({names}):", *body, *self.around])

    @property
    def function(self) -> Callable[..., jax.Array]:
        """The program itself."""
        names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax}
        exec(compile(self.text, self.file, "exec"), names)
        return names["f"]

    @property
    def eps(self) -> float:
        """The rounding of the narrowest float that operands go through."""
        if any(a.operand and a.dtype != "float32" for a in self.arguments):
            return float(jnp.finfo(jnp.bfloat16).eps)
        casts = NARROW if self.kind in NARROWED else {"bfloat16": ROUNDED}
        rounded = (d for d, c in casts.items() if any(c in line for line in self.lines))
        return float(jnp.finfo(next(rounded, "float32")).eps)

    @property
    def operands(self) -> tuple[int, ...]:
        """Which arguments it is differentiated by."""
        return tuple(i for i, a in enumerate(self.arguments) if a.operand)
