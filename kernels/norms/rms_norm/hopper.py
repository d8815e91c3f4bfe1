"""RMSNorm on Hopper GPUs, by the kernel of both norms."""

from rewriter.kernels.norms import rows_hopper
from rewriter.kernels.norms.rms_norm import xla
from rewriter.kernels.norms.rms_norm.estimate import estimate

KERNEL = rows_hopper.kernel("rms_norm", centred=False, by_xla=xla, estimate=estimate)
