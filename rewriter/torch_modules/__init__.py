"""PyTorch modules as JAX programs, through torchax: conversions, calls, gradients."""
