"""The only file that touches JAX internals.

One function per need, one comment per difference between the supported
versions (0.10.2, 0.11.2, 0.12).
"""

from __future__ import annotations
