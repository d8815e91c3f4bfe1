"""Attention, also to keys in pages and over blocks of keys."""
