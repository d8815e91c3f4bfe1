"""Quantised ragged dot, a form of ragged dots; read together with them."""

from __future__ import annotations

from rewriter.patterns.ragged_dot.quantized import PATTERN as PATTERN
