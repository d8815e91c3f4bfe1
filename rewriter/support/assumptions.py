"""Assumptions that a user may make about values without a proof.

Without `assume=` a site that depends on one of these is left as written.
"""

from __future__ import annotations

FINITE = "finite"
VARIED = "varied_rows"

ASSUMPTIONS = {
    FINITE: "scores and activations hold no NaN or infinity, so that guards against "
    "them change nothing",
    VARIED: "no row that is normalized is constant, so that guards of its variance "
    "change nothing",
}
"""The text of each assumption, by name."""
