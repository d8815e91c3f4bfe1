"""Checks a program after a pass: well typed, and with the same inputs and outputs.

It is for work on the engine: ``REWRITER_VALIDATE=1`` turns it on, and all tests do.
"""

from __future__ import annotations

from rewriter import _jax
from rewriter.run.program import Program


def validate(name: str, before: Program, after: Program) -> None:
    """Checks a program after a pass, unless the pass returned the same object.

    Args:
        name: The pass.
        before: The program before it.
        after: The program after it.

    Raises:
        AssertionError: If the program is no longer well typed, or its input or output
            types changed. The message names the pass.
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
