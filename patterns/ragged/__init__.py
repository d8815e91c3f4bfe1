"""Ragged dots and gated linear units of experts, also of 8-bit matrices."""
