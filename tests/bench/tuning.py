"""Tuning, held to what it promises: seconds, regret, equal choices, equal outputs.

``tune`` measures the shapes of ``kernels/<op>/shapes.py`` and writes a tuned file and
how long each took. ``regret`` times the candidates of such a file again, in another
process, and says by how much the chosen one is slower than the best. ``compare`` says
where two tuned files choose differently. ``outputs`` prints a digest of what the
chosen kernels compute, to be compared between processes. ``ship`` puts a tuned file
into ``kernels/<op>/tuned/``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rewriter.kernels.index import OPS
from rewriter.measure import autotune
from rewriter.measure.candidate import Candidate, compile_all
from rewriter.measure.decision import fastest
from rewriter.measure.inputs import inputs
from rewriter.measure.key import BOTH, FORWARD, Key
from rewriter.measure.measurement import Measurement
from rewriter.measure.programs import Task, function
from rewriter.measure.times import time_in_turns
from rewriter.measure.tuned import Tuned
from rewriter.ops import device
from rewriter.ops.kernel import Kernel
from rewriter.ops.registry import registry
from rewriter.site.implementation import XLA
from rewriter.tools.bench_ops import named_uses
from tests.bench import record

COMMAND = "python3 -m tests.bench.tuning"
NEAR = 1.5
"""Candidates that take longer than so many times the best's are not shipped."""

AGAIN = 1.1
"""The same, of what is timed again."""


def tasks(
    ops: Sequence[str],
    shapes: str,
    kernels: Sequence[str] = (),
    passes: Sequence[str] = (FORWARD, BOTH),
) -> list[Task]:
    """Every use of some ops, forward and with gradients; with some kernels, or all."""
    return [
        Task(registry().op(op), spec, _named(registry().kernels(op), kernels), one)
        for op in ops
        for spec in named_uses(op, shapes)
        for one in passes
    ]


def _named(kernels: Sequence[Kernel], names: Sequence[str]) -> tuple[Kernel, ...]:
    return tuple(k for k in kernels if not names or k.name in names)


def tune(given: argparse.Namespace) -> None:
    """Measures every use; cold, unless the cache has it. For a target: estimates it."""
    made, rows = Tuned(), []
    on = device.named(given.target) if given.target else None
    start = time.monotonic()
    ops, sets = given.ops.split(","), given.shapes.split(",")
    kernels = given.kernels.split(",") if given.kernels else ()
    passes = given.passes.split(",")
    for task in [t for name in sets for t in tasks(ops, name, kernels, passes)]:
        if time.monotonic() - start > given.budget:
            break
        begin = time.perf_counter()
        found = autotune.measure([task], given.level, on=on, spares=not given.xla)
        cold = time.perf_counter() - begin
        begin = time.perf_counter()
        autotune.measure([task], given.level, on=on)
        cached = time.perf_counter() - begin
        made |= found
        print(found.table(), flush=True)
        for key, measurements in found.entries:
            decision = fastest(measurements)
            best = decision.best.implementation.text if decision else None
            rows.append({"use": key.text, "candidates": len(measurements),
                         "cold_s": round(cold, 2), "cached_s": round(cached, 4),
                         "chosen": best})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    made.save(given.out)
    if given.json:
        record.write(given.json, f"{COMMAND} tune", results=rows)


def task_of(key: Key) -> Task:
    """The task that a key of the named shapes belongs to."""
    on = device.attached()
    for shapes in ("targets", "others", "small"):
        for task in tasks([key.op], shapes):
            if task.key(on) == key:
                return task
    raise LookupError(key.text)


def regret(given: argparse.Namespace) -> None:
    """Times again what was near the best, and compares what was chosen with it."""
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for key, measurements in Tuned.load(given.tuned).entries:
        decision = fastest(measurements)
        if decision is None or key.op not in given.ops.split(","):
            continue
        if time.monotonic() - start > given.budget:
            print(f"stopped after {given.budget:.0f} s")
            break
        rows.append(again(task_of(key), measurements, decision.best))
        print(json.dumps(rows[-1]), flush=True)
    worst = max(r["regret"] for r in rows)
    print(f"largest regret {worst:.1%} of {len(rows)}")
    if given.json:
        record.write(
            given.json, f"{COMMAND} regret", largest_regret=worst, results=rows
        )


def again(
    task: Task, measurements: Sequence[Measurement], chosen: Measurement
) -> dict[str, Any]:
    """A row: the chosen one's time now, and the best's."""
    limit = AGAIN * (chosen.median_us or 0.0)
    near = [m for m in measurements if m.median_us and m.median_us <= limit]
    drawn = inputs(task, device.attached())
    first = drawn[0].sets[0]
    jobs = [
        (Candidate(i.text, function(task, i)), first, None)
        for i in (m.implementation for m in near)
    ]
    forever = time.monotonic() + 1e6
    compiled = compile_all(jobs, forever, forever)
    for c in compiled:
        jax.block_until_ready(c.program(*first))
    found = time_in_turns(compiled, drawn, 30)
    samples = [found[c.name].as_one for c in compiled]
    times = [1e6 * s.median for s in samples]
    mine = times[near.index(chosen)]
    best = min(range(len(near)), key=times.__getitem__)
    noise = max(s.error for s in samples)
    return {
        "use": task.key(device.attached()).text,
        "chosen": chosen.implementation.text,
        "chosen_us": round(mine, 2),
        "best": near[best].implementation.text,
        "best_us": round(times[best], 2),
        "regret": round(mine / times[best] - 1, 4),
        "standard_error": round(1e6 * noise / times[best], 4),
        "method": samples[0].method,
        "input_sets": sum(len(d.sets) for d in drawn),
    }


def compare(given: argparse.Namespace) -> None:
    """Says where two tuned files choose differently, and by how much it matters."""
    first, second = (Tuned.load(p) for p in given.tuned)
    same, other, gaps = 0, [], []
    for key, measurements in first.entries:
        a, b = fastest(measurements), fastest(second.find(key))
        if a is None or b is None:
            continue
        mine, theirs = a.best.implementation, b.best.implementation
        if a.best.median_us and b.best.median_us:
            gaps.append(abs(a.best.median_us / b.best.median_us - 1))
        if mine == theirs:
            same += 1
            continue
        times = {m.implementation: m.median_us or 0.0 for m in measurements}
        lost = times.get(theirs, 0.0) / times[mine] - 1
        other.append({"use": key.text, "first": mine.text, "second": theirs.text,
                      "slower_by_first": round(lost, 4)})  # fmt: skip
    figures = {"same": same, "different": other,
               "median_gap_of_times": round(statistics.median(gaps), 4)}  # fmt: skip
    print(json.dumps(figures, indent=1))
    if given.json:
        record.write(given.json, f"{COMMAND} compare", **figures)


def outputs(given: argparse.Namespace) -> None:
    """Prints a digest of what every chosen implementation computes, and one of all."""
    whole, rows = hashlib.sha256(), []
    start = time.monotonic()
    for key, measurements in Tuned.load(given.tuned).entries:
        decision = fastest(measurements)
        if decision is None or key.op not in given.ops.split(","):
            continue
        if time.monotonic() - start > given.budget:
            print(f"stopped after {given.budget:.0f} s")
            break
        task = task_of(key)
        chosen = decision.best.implementation
        run = jax.jit(function(task, chosen))
        digest = hashlib.sha256()
        for drawn in inputs(task, device.attached()):
            for leaf in jax.tree.leaves(run(*drawn.sets[0])):
                digest.update(np.asarray(leaf).tobytes())
        whole.update(digest.digest())
        rows.append(
            {"use": key.text, "chosen": chosen.text, "digest": digest.hexdigest()[:16]}
        )
    print(len(rows), whole.hexdigest())
    if given.json:
        record.write(given.json, f"{COMMAND} outputs", results=rows)


def worth_shipping(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Those near the best, each kernel's best, and XLA's."""
    timed = sorted((m for m in measurements if m.median_us), key=lambda m: m.median_us)
    limit = NEAR * timed[0].median_us if timed else 0.0
    kept: dict[str, Measurement] = {}
    for m in timed:
        name = m.implementation.name
        if m.median_us <= limit or name not in kept:
            kept[name if name not in kept else m.implementation.text] = m
    return tuple(kept.values())


def _xla(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    return tuple(m for m in measurements if m.implementation.name == XLA)


def ship(given: argparse.Namespace) -> None:
    """Puts a tuned file into the package: by op, without what could not run.

    What is in the package of other uses stays, and XLA's time of a use that has none
    now, as where there was too little memory for it this time.
    """
    tuned = Tuned.load(given.tuned)
    for op in sorted({key.op for key, _ in tuned.entries}):
        entries = tuple(
            (key, worth_shipping(ms))
            for key, ms in tuned.entries
            if key.op == op and any(m.median_us for m in ms)
        )
        slug = entries[0][0].device.lower().replace(" ", "_")
        path = pathlib.Path(f"kernels/{OPS[op].replace('.', '/')}/tuned/{slug}.json")
        path.parent.mkdir(exist_ok=True)
        old = dict(Tuned.load(path).entries) if path.exists() else {}
        new = {key: ms if _xla(ms) else ms + _xla(old.get(key, ()))
               for key, ms in entries}  # fmt: skip
        new |= {key: ms for key, ms in old.items() if key not in new}
        Tuned(tuple(new.items())).save(path)
        print(path, len(entries))


def main() -> None:
    """Runs one of the five."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = ("tuned",)
    runs = ((tune, ()), (regret, one), (outputs, one), (ship, one))
    for run, positional in runs:
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("--json", type=pathlib.Path)
        command.add_argument("--ops", default=",".join(registry().ops()))
        command.add_argument("--budget", type=float, default=3600.0)
        for name in positional:
            command.add_argument(name)
        if run is tune:
            command.add_argument("--out", required=True)
            command.add_argument("--shapes", default="targets")
            command.add_argument("--level", default="full")
            command.add_argument("--target", help="a TPU generation, such as tpu_v5e")
            command.add_argument("--kernels", help="only these, and XLA")
            command.add_argument("--passes", default=f"{FORWARD},{BOTH}")
            command.add_argument(
                "--xla", action="store_true", help="time XLA's however long it takes"
            )
    two = commands.add_parser("compare")
    two.set_defaults(run=compare)
    two.add_argument("tuned", nargs=2)
    two.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    os.environ.setdefault("REWRITER_CACHE_DIR", tempfile.mkdtemp())
    main()
