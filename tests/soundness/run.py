"""Random programs by the thousand, and which of them the rewriter changes.

python -m tests.soundness.run --programs 10000 [--first N] [--kind mask] [--grad]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence

os.environ["REWRITER_CACHE_DIR"] = tempfile.mkdtemp(prefix="rewriter-soundness-")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from tests.soundness.check import FORWARD, WAYS, Finding, check
from tests.soundness.grammar import KINDS, program
from tests.soundness.program import Program

TOGETHER = 15


def batches(programs: Sequence[Program]) -> Iterator[Sequence[Program]]:
    """Programs that are compiled together."""
    for first in range(0, len(programs), TOGETHER):
        yield programs[first : first + TOGETHER]


def main(words: Sequence[str] | None = None) -> int:
    """Prints what is wrong, and says whether anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(KINDS))
    parser.add_argument("--grad", action="store_true", help="gradients, too")
    options = parser.parse_args(words)
    seeds = range(options.first, options.first + options.programs)
    programs = [program(seed, options.kind) for seed in seeds]
    findings: list[Finding] = []
    replaced: set[str] = set()
    done, start = 0, time.perf_counter()
    for together in batches(programs):
        outcome = check(together, WAYS if options.grad else (FORWARD,))
        findings += outcome.findings
        replaced |= outcome.replaced
        done += len(together)
        for finding in outcome.findings:
            print(finding, flush=True)
        seconds = time.perf_counter() - start
        print(
            f"{done} programs, {len(replaced)} with a kernel, {len(findings)} wrong,"
            f" {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    print(_summary(programs, replaced, findings))
    return bool(findings)


def _summary(
    programs: Sequence[Program], replaced: set[str], findings: Sequence[Finding]
) -> str:
    """How many programs of each kind have a kernel, and how many are wrong."""
    every = Counter(p.kind for p in programs)
    found = Counter(p.kind for p in programs if p.file in replaced)
    wrong = Counter(
        kind for kind, _ in {(f.program.kind, f.program.seed) for f in findings}
    )
    lines = [
        f"{kind:8s} {every[kind]:6d} programs, {found[kind] / every[kind]:4.0%} with a"
        f" kernel, {wrong[kind]} wrong"
        for kind in every
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
