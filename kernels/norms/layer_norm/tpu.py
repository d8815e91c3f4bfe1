"""LayerNorm on TPUs, by the kernel of both norms."""

from rewriter.kernels.norms import rows_tpu
from rewriter.kernels.norms.layer_norm.estimate import estimate

KERNEL = rows_tpu.kernel("layer_norm", centred=True, estimate=estimate)
