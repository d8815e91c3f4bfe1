"""What functions of flax.nnx and equinox need: state in and out, static leaves.

Nothing of a framework is imported here. It is looked up among the modules that are
loaded: where a framework was not imported, nothing can be of its types.
"""
