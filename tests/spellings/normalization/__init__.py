"""RMSNorm and LayerNorm as libraries and people write them."""

from tests.spellings.normalization import layer_norm as layer_norm
from tests.spellings.normalization import rms_norm as rms_norm
from tests.spellings.normalization.pieces import LAYER, RMS

SPELLINGS = [*RMS, *LAYER]
