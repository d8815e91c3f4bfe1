"""Attention, also with keys in pages and over blocks of keys."""
