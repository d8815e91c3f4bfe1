"""RMS norm: x / sqrt(mean x² + eps) * scale; read together with the layer norm."""

from __future__ import annotations

from rewriter.match import ReaderPattern
from rewriter.patterns.layer_norm import ANCHORS, STEPS, propose_rms_norm

PATTERN = ReaderPattern("rms_norm", ANCHORS, propose_rms_norm, STEPS)
