"""LayerNorm on Hopper GPUs, by the kernel of both norms."""

from rewriter.kernels.norms import rows_hopper
from rewriter.kernels.norms.layer_norm import xla
from rewriter.kernels.norms.layer_norm.estimate import estimate

KERNEL = rows_hopper.kernel("layer_norm", centred=True, by_xla=xla, estimate=estimate)
