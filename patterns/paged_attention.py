"""Paged attention, a form of attention; read together with it."""

from __future__ import annotations

from rewriter.patterns.attention.paged import PATTERN as PATTERN
