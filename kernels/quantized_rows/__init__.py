"""Programs of rows that end in 8 bits: a norm and what quantizes its rows, in one pass.

They are no op: `rewriter.ops.row_program` says what they are.
"""

from rewriter.kernels.quantized_rows.hopper import KERNEL as KERNEL
