"""Attention to a latent cache on Hopper GPUs: what the kernel supports."""
