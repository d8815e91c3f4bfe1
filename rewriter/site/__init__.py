"""A site: the equation that stands for an op in the rewritten program.

`site` is the JAX primitive with its rules of differentiation and batching. `uses`
describes one use of an op, `implementation` names what computes it, and `implement` and
`kernel_call` run it. `lowering` gives each platform its kernel, and `result_types` are
the types of what sites return. `vmap_levels` merges levels of `jax.vmap` into axes of
the op. `shards` and `ring` run a site on several devices. `fusable_adds` and
`residual_stream` are for sites that add a residual themselves, and `packed` is for
those whose operands are parts of one array.
"""
