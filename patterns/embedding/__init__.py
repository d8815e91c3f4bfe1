"""Lookups of rows in a table, and their gradients."""
