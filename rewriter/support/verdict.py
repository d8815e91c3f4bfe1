"""Verdicts: a check's yes or no, with every reason for a no."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why something was refused.

    Attributes:
        code: A short stable name, such as ``"effects"``.
        text: One plain sentence with the limit and the actual value.
        where: The user's source line, such as ``"model.py:88 (Attention)"``.
    """

    code: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.text}    {self.where}" if self.where else self.text


@dataclass(frozen=True)
class Verdict:
    """The answer of a check: yes, or no with reasons.

    A verdict has no truth value on purpose: ``if verdict`` would pass for a
    function that forgot to look at ``ok``.

    Example:
        >>> from rewriter.support.verdict import all_of, no, YES
        >>> all_of(YES, no("rank", "rank is 3, expected 4")).ok
        False
    """

    ok: bool
    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        raise TypeError("a Verdict has no truth value; read .ok or .reasons")


YES = Verdict(True)


def no(code: str, text: str, where: str = "") -> Verdict:
    """Returns a refusal with one reason."""
    return Verdict(False, (Reason(code, text, where),))


def all_of(*verdicts: Verdict) -> Verdict:
    """Returns yes if every verdict is yes, else a no with all the reasons."""
    reasons = tuple(r for v in verdicts for r in v.reasons)
    return Verdict(all(v.ok for v in verdicts), reasons)
