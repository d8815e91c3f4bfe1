"""The gradients of a match, where the program computes them itself.

A differentiated program holds an op's forward and, further down, equations that
turn a cotangent of its result into cotangents of its operands. Those are found
from the equations that read the region's values, and each one is verified: its
normal form must be that of `jax.vjp` of the op's reference.

`cotangents` says what may be the cotangent, and what is computed from it. `reference`
and `proof` then verify it. `search` calls them, and asks `known` first whether the
same equations were proved before. A match whose result
has no cotangent in the program may be one of a value further down: see `relaid`.
One that reads an array whose gradient is not its own may read pieces: see `cut`.
A match whose parameter holds equations of the program is proved with their results
given: see `taken`. If it has none as a special form, `general_form` takes the op.
"""
