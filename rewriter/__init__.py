"""rewriter: ordinary JAX code on the best kernels for its chip."""

__version__ = "0.1.0"
