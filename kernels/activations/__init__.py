"""Activations and their gradients, with sums for biases, in one pass over memory.

They are no op: `rewriter.ops.elementwise_program` says what they are.
"""

from rewriter.kernels.activations.hopper import KERNEL as KERNEL
