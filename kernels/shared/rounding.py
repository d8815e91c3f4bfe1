"""Steps from stored numbers to a matrix, or behind a product, computed in float32.

A kernel joins factors and addends in float32, and rounds to 16 bits where the program
does. That gives the numbers of a program that computes in these 16 bits: float32 has
more than twice their digits, so that rounding twice rounds as once.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDE = frozenset({"float32", "int32", "int16"})
"""Dtypes that hold all numbers of 8 bits, and sums with whole numbers up to `MOST`."""

SIXTEEN = frozenset({"bfloat16", "float16"})
MOST = 1 << 10
ROUND = "round"
"""The sign of a step that rounds to a dtype."""


@dataclass(frozen=True)
class InFloat32:
    """Steps in float32, before the last rounding.

    Attributes:
        steps: Signs, and what they join: ``"scale"``, ``"zero"`` or a number. After
            `ROUND` comes a dtype.
        dtypes: The dtypes in which the program joins arrays, by their names.
    """

    steps: tuple[tuple[str, str | float], ...]
    dtypes: tuple[tuple[str, str], ...]


def in_float32(widen: str, dtype: str, stored: str = "int8") -> InFloat32 | None:
    """Returns how a kernel computes steps that end in a dtype; None if it cannot.

    Args:
        widen: The steps, see `rewriter.ops.widening`.
        dtype: The dtype of the rows, bfloat16 or float16.
        stored: The dtype of the numbers. Casts of floats to integers lose digits.

    Example:
        >>> in_float32("bfloat16 *scale", "bfloat16").steps
        (('*', 'scale'),)
        >>> in_float32("bfloat16 -zero *scale", "bfloat16").steps
        (('-', 'zero'), ('round', 'bfloat16'), ('*', 'scale'))
        >>> in_float32("float32 -8.0 *scale bfloat16", "bfloat16").steps
        (('-', 8.0), ('*', 'scale'))
        >>> in_float32("bfloat16 /scale", "bfloat16")
        >>> in_float32("int32 float32 bfloat16", "bfloat16", "float8_e5m2")
    """
    if dtype not in SIXTEEN:
        return None
    held, steps, dtypes = "", [], {}
    for step in widen.split():
        sign, what = step[0], step[1:]
        if sign == "/" or not (
            sign in "*-+" or _holds(step, held, bool(steps), stored)
        ):
            return None
        if sign not in "*-+":
            if step in SIXTEEN and steps:
                steps.append((ROUND, step))
            held = step
            continue
        known = what if what in ("scale", "zero") else float(what)
        if held in ("int32", "int16") and not _small(known):
            return None
        if held not in SIXTEEN | WIDE:
            return None
        steps.append((sign, known))
        if isinstance(known, str):
            dtypes[known] = held
        if held in SIXTEEN:
            steps.append((ROUND, held))
    if held not in ("", dtype) or (steps and held != dtype):
        return None
    while steps and steps[-1] == (ROUND, dtype):
        steps.pop()  # as storing to that dtype does
    return InFloat32(tuple(_once(steps)), tuple(sorted(dtypes.items())))


@dataclass(frozen=True)
class Behind:
    """Steps behind a product in float32, before the last rounding.

    Attributes:
        steps: As of `InFloat32`; also with the sign ``/``, and ``"scale*rows"``.
        dtype: The dtype of the result.
        dtypes: The dtypes in which the program joins arrays, by their names.
    """

    steps: tuple[tuple[str, str | float], ...]
    dtype: str
    dtypes: tuple[tuple[str, str], ...]

    @property
    def rounds_a_product_before_a_sum(self) -> bool:
        """Whether a product is rounded, and then something is added to it."""
        signs = [sign for sign, _ in self.steps]
        three = zip(signs, signs[1:], signs[2:], strict=False)
        return any(a in "*/" and b == ROUND and c in "+-" for a, b, c in three)


def behind_in_float32(behind: str, dtype: str) -> Behind | None:
    """Returns how a kernel computes steps behind a product; None if it cannot.

    Args:
        behind: The steps, see `rewriter.ops.widening`.
        dtype: The dtype of the product.

    Example:
        >>> behind_in_float32("float32 *scale bfloat16", "bfloat16").steps
        (('round', 'bfloat16'), ('*', 'scale'))
        >>> behind_in_float32("float32 *scale *rows", "int32").dtypes
        (('rows', 'float32'), ('scale', 'float32'))
        >>> behind_in_float32("bfloat16 *scale", "int32")
    """
    steps: list[tuple[str, str | float]] = []
    dtypes: dict[str, str] = {}
    held = dtype
    for step in behind.split():
        sign, what = step[0], step[1:]
        if sign not in "*/-+":
            # Only float32 is made of integers: they may have more digits.
            if step not in SIXTEEN | {"float32"} or (
                held not in SIXTEEN | {"float32"} and step != "float32"
            ):
                return None
            steps.append((ROUND, held))
            held = step
            continue
        if held not in SIXTEEN | {"float32"}:
            return None
        steps.append((ROUND, held))
        named = what.replace("*", "").isalpha()
        names = what.split("*") if named else ()
        if any(dtypes.setdefault(name, held) != held for name in names):
            return None
        if len(names) > 1 and held != "float32":
            return None  # their product is rounded, too
        steps.append((sign, what if named else float(what)))
    exact = {"float32", "int32"}
    kept = tuple(x for x in steps if x[0] != ROUND or x[1] not in exact)
    return Behind(kept, held, tuple(sorted(dtypes.items())))


def _holds(new: str, held: str, joined: bool, stored: str) -> bool:
    """Whether float32 holds what a cast gives, once it is rounded."""
    if new in SIXTEEN | {"float32"}:
        return True
    if joined or "float" in stored:
        return False
    if new in ("int32", "int16"):
        return held in ("", "int8")
    return new == "int8" and stored in ("int8", "int4", "uint4")


def _small(number: str | float) -> bool:
    whole = isinstance(number, float) and number.is_integer()
    return whole and abs(number) <= MOST


def _once(steps: list[tuple[str, str | float]]) -> list[tuple[str, str | float]]:
    """The same without a rounding right after the same one."""
    pairs = zip([None, *steps], steps, strict=False)
    return [x for before, x in pairs if not (x[0] == ROUND and x == before)]
