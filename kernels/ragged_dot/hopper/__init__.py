"""Ragged dot on NVIDIA Hopper GPUs, in Pallas Mosaic GPU."""
