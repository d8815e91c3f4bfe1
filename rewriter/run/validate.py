"""Checks a program after a pass: well typed, and with the same inputs and outputs.

It is for work on the engine: ``REWRITER_VALIDATE=1`` turns it on, and all tests do.
"""

from __future__ import annotations

from rewriter import _jax
from rewriter.run.program import Program


def validate(name: str, before: Program, after: Program) -> None:
    """Checks what a pass made of a program; nothing if the program is the same object.

    Args:
        name: The pass.
        before: The program in front of it.
        after: The program behind it.

    Raises:
        AssertionError: If the program is not well typed any more, or if it takes or
            gives other types than the original; the pass is named.
    """
    made, written = after.closed_jaxpr, before.original
    if made is before.closed_jaxpr:
        return
    try:
        _jax.check_types(made)
    except Exception as why:
        raise AssertionError(f"after {name!r} the program is not typed: {why}") from why
    if after.folded is not None and name != "unfold" and made is not written:
        return  # some of its layers are left out
    for what, given, wanted in (
        ("takes", made.in_avals, written.in_avals),
        ("gives", made.out_avals, written.out_avals),
    ):
        got, should = list(map(str, given)), list(map(str, wanted))
        assert got == should, f"after {name!r} the program {what} {got}, not {should}"
