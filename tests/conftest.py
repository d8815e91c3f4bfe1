"""Settings for all tests, made before JAX starts its backend."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator

import pytest

# What a developer tuned on this machine decides nothing here.
os.environ["REWRITER_CACHE_DIR"] = tempfile.mkdtemp(prefix="rewriter-tests-")

# On a host without a TPU, for the TPU compiler, also in several processes.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Tests compile thousands of tiny programs and run each once or twice. XLA:CPU without
# optimization takes half the time to compile them (attention with its gradient,
# 2 CPU cores, jax 0.10.2: 0.5 instead of 1.1 s of CPU time).
FAST_COMPILE = "--xla_backend_optimization_level=0"

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test measures decides nothing in the next."""
    from rewriter.measure import cache

    monkeypatch.setenv("REWRITER_CACHE_DIR", str(tmp_path / "cache"))
    cache._process.cache_clear()
    yield
    cache._process.cache_clear()


def pytest_configure() -> None:
    """Has programs checked after every pass, on the oldest version of JAX."""
    import jax

    if jax.__version_info__ < (0, 11):
        os.environ["REWRITER_VALIDATE"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Takes a part of the tests that run once, as ``REWRITER_TESTS_PART=1/4`` asks.

    A test is in the same part everywhere. Random programs are in every part.
    """
    asked = os.environ.get("REWRITER_TESTS_PART")
    if asked is None:
        return
    part, parts = map(int, asked.split("/"))
    left_out = [
        item
        for item in items
        if item.get_closest_marker("once")
        and "soundness" not in item.path.parts
        and zlib.crc32(item.nodeid.encode()) % parts != part
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
