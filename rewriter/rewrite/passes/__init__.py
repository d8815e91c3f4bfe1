"""Passes over the rewritten program, each a function from program to program.

`checkpoint_savings` keeps results that are cheap to keep. `adds_into_shards` and
`fuse_residual_adds` move residual adds into kernels. `memory_order` passes transposed
operands without a copy, `packed_operands` those that are parts of one array.
`checkpoint_policies` keeps a checkpoint's policy as it was.
`recompute` computes stacked residuals again in the backward pass. `flops` estimates the
work of an equation.
"""
