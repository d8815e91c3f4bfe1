"""Embedding: sums of rows by their ids, which is the gradient of a lookup."""
