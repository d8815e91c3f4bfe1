"""Settings for all tests, made before JAX starts its backend."""

from __future__ import annotations

import os
import tempfile

# What a developer tuned on this machine decides nothing here.
os.environ["REWRITER_CACHE_DIR"] = tempfile.mkdtemp(prefix="rewriter-tests-")

# Tests compile thousands of tiny programs and run each once or twice. XLA:CPU without
# optimization takes half the time to compile them (attention with its gradient,
# 2 CPU cores, jax 0.10.2: 0.5 instead of 1.1 s of CPU time).
FAST_COMPILE = "--xla_backend_optimization_level=0"

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}"
