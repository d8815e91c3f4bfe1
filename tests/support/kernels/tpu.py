"""Proves TPU kernels without a TPU: compiled for every generation, and interpreted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rewriter.hardware import ahead_of_time
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops.device import Device
from rewriter.ops.tpu import GENERATIONS
from tests import slow

NEWER = tuple(int(x) for x in jax.__version__.split(".")[:2]) >= (0, 12)
"""Whether the interpreter raises where it finds a race; before, it prints."""

KINDS = {g.name: Device(g.kind, "tpu", shared_memory=g.vmem) for g in GENERATIONS}
"""Device kinds by the generation's public name."""

needs_compiler = pytest.mark.skipif(
    not ahead_of_time.can_compile(KINDS["v5e"]),
    reason="needs libtpu: pip install -e '.[tpu_compiler]' on Linux",
)


def each_generation(cases: Sequence[Any]) -> list[Any]:
    """Parameters (generation, case): by default one case of each, the cases in turn."""
    names = list(KINDS)
    quick = [(name, cases[i % len(cases)]) for i, name in enumerate(names)]
    pairs = itertools.product(names, cases)
    return slow.unless(lambda *pair: pair in quick, pairs, several=True)


def compiled(generation: str, function: Callable[..., Any], *specs: Any) -> str:
    """Returns the program that the TPU compiler makes of a function of one kernel."""
    program = ahead_of_time.compiled(KINDS[generation], function, *specs)
    text = program.as_text()
    assert "tpu_custom_call" in text
    return text


def close(got: Any, want: np.ndarray, tolerance: Mapping[str, float]) -> None:
    """Asserts an array's shape, and its error beside the largest entry, by dtype."""
    size = max(1.0, np.abs(want).max(initial=0.0))
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    assert got.shape == want.shape
    assert error <= tolerance[str(got.dtype)] * size


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, TPU kernels are computed by jax.numpy: fast, and numbers only."""

    class Interpreted:
        pallas_call = staticmethod(
            functools.partial(pallas_tpu.pl.pallas_call, interpret=True)
        )

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    original = pallas_tpu.pl
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu, "pl", Interpreted())
        yield


@contextmanager
def simulated(capfd: pytest.CaptureFixture[str], cores: int = 1) -> Iterator[None]:
    """Within, TPU kernels run on JAX's simulator of memory and copies: slow.

    Memory is NaN before it is written. A race, or a read out of bounds, fails.
    """
    more: dict[str, Any] = {"num_cores_or_threads": cores}
    params = pltpu.InterpretParams(detect_races=True, **more)
    capfd.readouterr()
    with pltpu.force_tpu_interpret_mode(params):
        yield
        jax.effects_barrier()
    said = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in said, said
