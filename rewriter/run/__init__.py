"""What a user calls: optimize, explain, tune, verify, export.

`pipeline` is the table of contents of the engine. `analysis` calls it once per
signature, `deferred` when the placement of arguments is known, and `optimize` wraps the
result like `jax.jit`.
"""
