"""The gradients of a match, where the program computes them itself.

A differentiated program holds an op's forward and, further down, equations that
turn a cotangent of its result into cotangents of its operands. Those are found
from the equations that read the region's values, and each one is verified: its
normal form must be that of `jax.vjp` of the op's reference.

`cotangents` says what may be the cotangent, and what is computed from it. `reference`
and `proof` then verify it. `search` calls them, and asks `proved_before` first whether
the same equations were proved before.

A match whose result has no cotangent in the program may have one further down: see
`other_layouts`. One that reads an array whose gradient is not its own may read pieces
of it: see `operand_pieces`. A match whose parameter holds equations of the program is
proved with their results given: see `function_parameters`. Where a special form has no
gradients, `general_form` takes the general op.
"""
