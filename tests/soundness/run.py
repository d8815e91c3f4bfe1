"""Random programs by the thousand, and which of them the rewriter changes.

python -m tests.soundness.run --seeds 0:10000 --gradients --processes 60 --log FILE

Prints every finding with its seed, and a summary in one line at the end. A program that
could not be checked counts as not run: XLA's compiler aborted, or it took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests.soundness.grammar import KINDS, TURNS
from tests.soundness.pool import Checked, Limits, NotRun, run
from tests.soundness.worker import Key

EVERY = 20.0
"""Seconds between two lines that say how far it is."""


@dataclass
class Tally:
    """What came of the programs so far.

    Attributes:
        checked: Programs that were compared.
        replaced: Those with a kernel in the forward pass.
        wrong: Those that are computed otherwise.
        not_run: Those that were not compared, by the reason.
    """

    checked: list[Key] = field(default_factory=list)
    replaced: set[Key] = field(default_factory=set)
    wrong: set[Key] = field(default_factory=set)
    not_run: list[NotRun] = field(default_factory=list)

    def add(self, outcome: Checked | NotRun, log: _Both) -> None:
        """Counts what came of programs, and writes down what is to be read."""
        if isinstance(outcome, NotRun):
            if outcome.rewritten:
                self.wrong.add(outcome.key)
                text = f"wrong: {outcome.why} when rewritten, and not as it is written"
            else:
                self.not_run.append(outcome)
                text = f"not run: {outcome.why}"
            print(f"{outcome.key}: {text}", file=log, flush=True)
            return
        self.checked += outcome.keys
        self.replaced |= set(outcome.reply.replaced)
        for key, text in outcome.reply.findings:
            self.wrong.add(key)
            print(text, file=log, flush=True)

    def line(self) -> str:
        """All counts in one line."""
        same = len(set(self.checked) - self.wrong)
        reasons = Counter(one.why for one in self.not_run)
        which = ", ".join(f"{n}: {why}" for why, n in reasons.items())
        lost = f"{len(self.not_run)} not run" + (f" ({which})" if which else "")
        return (
            f"{same} the same, {len(self.wrong)} wrong, {lost};"
            f" {len(self.replaced)} with a kernel"
        )

    def kinds(self) -> str:
        """How many programs of each kind have a kernel, and how many are wrong."""
        every = Counter(key.kind for key in self.checked)
        found = Counter(key.kind for key in self.replaced)
        wrong = Counter(key.kind for key in self.wrong)
        return "\n".join(
            f"{kind:9s} {every[kind]:6d} programs, {found[kind] / every[kind]:4.0%}"
            f" with a kernel, {wrong[kind]} wrong"
            for kind in sorted(every)
        )


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    seeds = lambda text: range(*map(int, text.split(":")))
    parser.add_argument("--seeds", type=seeds, default=range(300), metavar="FIRST:END")
    parser.add_argument(
        "--kind", choices=sorted(KINDS), action="append",
        help="may be given several times; without it kinds take turns",
    )  # fmt: skip
    parser.add_argument("--gradients", action="store_true", help="gradients, too")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, default=150.0,
        help="seconds for 15 programs together, and for one that is checked alone",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end after so many"
    )
    parser.add_argument(
        "--log", type=Path, help="a file for findings, beside the output"
    )
    return parser.parse_args(words)


def _keys(seeds: range, kinds: Sequence[str] | None) -> list[Key]:
    """The programs of seeds."""
    turns = lambda seed: [TURNS[seed % len(TURNS)]]
    return [Key(kind, seed) for seed in seeds for kind in kinds or turns(seed)]


@dataclass(frozen=True)
class _Both:
    """Writes to several files, such as the output and a log."""

    files: tuple[TextIO, ...]

    def write(self, text: str) -> None:
        for file in self.files:
            file.write(text)

    def flush(self) -> None:
        for file in self.files:
            file.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Prints what is wrong, and says whether anything is."""
    options = _options(words)
    keys = _keys(options.seeds, options.kind)
    limits = Limits(options.limit, options.seconds)
    tally, start = Tally(), time.monotonic()
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context
        files = [opened(options.log.open("w"))] if options.log else []
        log = _Both((sys.stdout, *files))
        folder = opened(tempfile.TemporaryDirectory(prefix="rewriter-soundness-"))
        _count(
            tally, run(keys, options.gradients, options.processes, limits, folder), log
        )
        ways = "forward and gradients" if options.gradients else "forward"
        seeds = f"{options.seeds.start}:{options.seeds.stop}"
        print(
            f"{tally.kinds()}\nseeds {seeds}, {ways}, jax {jax.__version__}:"
            f" {tally.line()}; {time.monotonic() - start:.0f} s,"
            f" {options.processes} processes",
            file=log,
            flush=True,
        )
    return bool(tally.wrong)


def _count(tally: Tally, outcomes: Iterable[Checked | NotRun], log: _Both) -> None:
    """Counts what comes, and says from time to time how far it is."""
    start = said = time.monotonic()
    for outcome in outcomes:
        tally.add(outcome, log)
        if time.monotonic() > said + EVERY:
            said = time.monotonic()
            print(f"{said - start:.0f} s: {tally.line()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
