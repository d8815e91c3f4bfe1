"""A GPU of Python threads, on which `simulator` runs kernels."""
