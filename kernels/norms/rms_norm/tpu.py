"""RMSNorm on TPUs, by the kernel of both norms."""

from rewriter.kernels.norms import rows_tpu
from rewriter.kernels.norms.rms_norm.estimate import estimate

KERNEL = rows_tpu.kernel("rms_norm", centred=False, estimate=estimate)
