"""Regions in, matches or ranked near misses out."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.verdict import Reason


@dataclass(frozen=True)
class NearMiss:
    """A part of the program that almost was an op.

    Attributes:
        op: The nearest op.
        where: The user's line, such as ``"model.py:88 (Attention.__call__)"``.
        reasons: Everything that stands in the way.
        difference: The algebraic difference in words, or ``""``.
        score: How near it is, between 0 and 1.
        suggestion: What to do about it, or ``""``.
    """

    op: str
    where: str
    reasons: tuple[Reason, ...]
    difference: str
    score: float
    suggestion: str
