"""RMS norm, layer norm and group norm as libraries and people write them."""

from tests.spellings.normalization import group_norm as group_norm
from tests.spellings.normalization import layer_norm as layer_norm
from tests.spellings.normalization import rms_norm as rms_norm
from tests.spellings.normalization.group_norm import GROUP
from tests.spellings.normalization.pieces import LAYER, RMS

SPELLINGS = [*RMS, *LAYER, *GROUP]
