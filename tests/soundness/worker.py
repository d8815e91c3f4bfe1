"""A process that checks programs as it is asked to.

XLA's compiler may abort the process it runs in, or take very long. So programs are
checked in processes that can be lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

FAST = (
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""Compiles small programs in a tenth of the time that users' take: without
optimizations, and without MLIR, which XLA starts anew for each loop."""


@dataclass(frozen=True)
class Key:
    """Which program is meant.

    Attributes:
        kind: The grammar that writes it.
        seed: What it is drawn from.
    """

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} {self.seed}"


@dataclass(frozen=True)
class Request:
    """What a worker is to do.

    Attributes:
        keys: The programs that it checks together.
        gradients: Whether it compares gradients, too.
        only_written: Whether it only runs the programs as they are written.
    """

    keys: tuple[Key, ...]
    gradients: bool
    only_written: bool = False


@dataclass(frozen=True)
class Reply:
    """What came of it.

    Attributes:
        findings: Programs that are computed otherwise, each with what differs.
        replaced: Those of which the forward pass has a kernel in it.
    """

    findings: tuple[tuple[Key, str], ...] = ()
    replaced: tuple[Key, ...] = ()


def serve(asked: Connection, folder: str, core: int, flags: str) -> None:
    """Answers requests until there are no more.

    Args:
        asked: Where requests come from, and replies go to.
        folder: Where this process alone keeps measurements.
        core: The processor core that it runs on. XLA starts a thread for each core.
        flags: What XLA is told.
    """
    os.environ.update(REWRITER_CACHE_DIR=folder, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while (request := asked.recv()) is not None:
        asked.send(_only_written(request) if request.only_written else _check(request))


def _check(request: Request) -> Reply:
    """Compares programs with what they are rewritten to."""
    from tests.soundness.check import FORWARD, WAYS, check
    from tests.soundness.grammar import program

    programs = [program(key.seed, key.kind) for key in request.keys]
    outcome = check(programs, WAYS if request.gradients else (FORWARD,))
    keys = dict(zip((p.file for p in programs), request.keys, strict=True))
    return Reply(
        tuple((keys[f.program.file], str(f)) for f in outcome.findings),
        tuple(keys[file] for file in sorted(outcome.replaced)),
    )


def _only_written(request: Request) -> Reply:
    """Runs programs as they are written, to see whether XLA can compile them."""
    from tests.soundness import passes, values
    from tests.soundness.check import FORWARD, REWRITTEN_GRAD, Way
    from tests.soundness.grammar import program

    programs = [program(key.seed, key.kind) for key in request.keys]
    given = [values.arguments(p) for p in programs]
    ways: Sequence[Way] = [FORWARD, *[REWRITTEN_GRAD] * request.gradients]
    for way in ways:
        passes.compiled(way.original(programs))(given)
    return Reply()
