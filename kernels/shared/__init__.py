"""Code that kernels of several ops share: Pallas on each chip, tiles, activations."""
