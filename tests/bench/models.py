"""Training steps and inference of public models, unmodified: as written and rewritten.

  python3 -m tests.bench.models [--others] [--only NAMES] [--processes 4] [--json PATH]

Hugging Face's flax models of their usual sizes, with drawn weights in bfloat16. A step
is the loss, its gradients and an update by `optax.adamw`. It is given its weights and
the optimizer's state to write over (`donate_argnums`), as the library's own training
scripts do. Programs are compiled first, several at once, and timed afterwards, one by
one. Seconds of compiling are those beside the other programs. Figures are:

- milliseconds of a call (median, several in a row), and those of its kernels alone
- XLA's temporary memory
- seconds of tracing, lowering and compiling
- the share of the chip's peak, at 6 operations a weight and token, or 2 for inference
- the kernels that take most of the rewritten program's time

``--others`` measures models for which nothing was tuned.

Needs flax, optax and transformers before 5.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import transformers

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from tests.bench import in_turns, passes, record
from tests.bench.model_programs import programs_of
from tests.bench.other_models import OTHER_MODELS
from tests.bench.public_models import MODELS, Batch, Model

PEAK = {"H100": 989e12, "H200": 989e12}
"""Operations in bfloat16 a second, by the vendor's data sheets."""
IN_A_ROW = 10
"""Calls that follow each other without waiting, as in a training loop: a step gets the
weights that the last one gave. The host prepares a step while another runs."""
PASSES = ("inference", "step")
SHOWN = 8
"""How many kernels of a profile are kept."""


@dataclass(frozen=True)
class Prepared:
    """A model's programs, being compiled, and their arguments.

    Attributes:
        model: The model.
        weights: How many numbers its weights are.
        programs: By pass and ``"written"`` or ``"rewritten"``.
        reports: What was rewritten, by pass.
        seconds: Of tracing and lowering, by pass and program.
        draw: Makes the arguments of a pass.
        batch: What the model is given.
    """

    model: Model
    weights: int
    programs: dict[tuple[str, str], Future[tuple[Any, float]]]
    reports: dict[str, rewriter.Report]
    seconds: dict[tuple[str, str], float]
    draw: Callable[[str], tuple[Any, ...]]
    batch: Batch


def prepared(
    model: Model, small: bool, pool: ThreadPoolExecutor, only: Sequence[str] = PASSES
) -> Prepared:
    """Traces and lowers some of a model's passes, and has them compiled."""
    made = programs_of(model, small)
    batch, weights, given = made.batch, made.weights, made.given
    functions = {
        "inference": (made.inference, (weights, given)),
        "step": (made.step, (weights, made.state, given)),
    }
    programs, reports, seconds = {}, {}, {}
    for what in only:
        fn, args = functions[what]
        given_away = (0, 1) if what == "step" else ()
        fast = rewriter.optimize(fn, donate_argnums=given_away)
        written = jax.jit(fn, donate_argnums=given_away)
        for name, jitted in (("written", written), ("rewritten", fast)):
            start = time.perf_counter()
            lowered = jitted.lower(*args)
            seconds[what, name] = time.perf_counter() - start
            programs[what, name] = pool.submit(_compiled, lowered)
        reports[what] = fast.report(*args)
    count = sum(x.size for x in jax.tree.leaves(weights))

    initial, state = jax.jit(made.initial), jax.jit(made.optimizer.init)

    def draw(what: str) -> tuple[Any, ...]:
        drawn = initial(jax.random.key(0))
        return (drawn, batch) if what == "inference" else (drawn, state(drawn), batch)

    return Prepared(model, count, programs, reports, seconds, draw, batch)


def _compiled(lowered: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def measured(one: Prepared, repeats: int) -> list[dict[str, Any]]:
    """A row for each pass."""
    rows = []
    tokens = one.model.tokens(one.batch)
    for what, report in one.reports.items():
        row: dict[str, Any] = {
            "model": one.model.name, "pass": what, "weights": one.weights,
            "tokens": tokens, "sites": passes.sites(report),
        }  # fmt: skip
        results = {}
        for name in ("written", "rewritten"):
            program, seconds = one.programs[what, name].result()
            call = _passing_on(program, jax.device_put(one.draw(what)))
            row[name], results[name] = _timed(call, repeats)
            row[name]["temporary_bytes"] = program.memory_analysis().temp_size_in_bytes
            row[name]["lower_s"] = round(one.seconds[what, name], 2)
            row[name]["compile_s"] = round(seconds, 2)
            if timing.method() == "cupti":
                row["profile"] = _profile(call)
                row[name]["device_ms"] = row["profile"].pop("all")
            del call
        before, after = row["written"]["ms"], row["rewritten"]["ms"]
        row["faster"] = round(before / after, 3)
        row["difference"] = float(passes.difference(*results.values()))
        each = 6 if what == "step" else 2
        peak = next((x for n, x in PEAK.items() if n in _device()), None)
        if peak:
            share = each * one.weights * tokens / (after * 1e-3) / peak
            row["share_of_peak"] = round(share, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _device() -> str:
    return jax.devices()[0].device_kind


def _passing_on(program: Any, args: Sequence[Any]) -> Callable[[], Any]:
    """Calls a program; a step gets the weights and the state that the last one gave.

    Gives logits, or the loss of a step.
    """
    given = list(args)

    def call() -> Any:
        out = program(*given)
        if not isinstance(out, tuple):
            return out
        given[:2] = out[:2]
        return out[2]

    return call


def _timed(call: Callable[[], Any], repeats: int) -> tuple[dict[str, Any], Any]:
    """Times calls in a row, and gives what the first one gave, too."""
    first = jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            last = call()
        jax.block_until_ready(last)
        times.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)
    return {"ms": round(statistics.median(times), 3)}, first


def _profile(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels that take most time, by name without numbers."""
    found: Counter[str] = Counter()
    for name, seconds in _jax.kernel_seconds(call):
        found[re.sub(r"[_.]?\d+", "", name)[:60]] += 1e3 * seconds
    most = {name: round(ms, 3) for name, ms in found.most_common(SHOWN)}
    return {"all": round(sum(found.values()), 3), **most}


def measure_all(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Prepares the models of these names, and measures each when the device is free."""
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.threads or _threads(given.processes)) as pool:
        models = []
        for model in (m for m in _models(given) if m.name in names):
            try:
                chosen = given.passes.split(",")
                models.append(prepared(model, given.small, pool, chosen))
                print(f"lowered {model.name}", flush=True)
            except Exception:
                traceback.print_exc()
        for one in models:
            for program in one.programs.values():
                program.exception()
    with in_turns.turn():
        while models:
            one = models.pop(0)
            try:
                rows += measured(one, given.repeats)
            except Exception:
                traceback.print_exc()
            if given.json:
                in_turns.write(given.json, rows)


def _models(given: argparse.Namespace) -> tuple[Model, ...]:
    return OTHER_MODELS if given.others else MODELS


def _threads(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) * 3 // 4 // processes)


def main() -> None:
    """Measures the models that are asked for, in several processes if so asked."""
    parser = in_turns.parser(__doc__)
    parser.add_argument("--threads", type=int, help="that compile, in each process")
    parser.add_argument("--others", action="store_true", help="that nobody tuned for")
    given = parser.parse_args()
    names = [model.name for model in _models(given)]
    rows = in_turns.rows_of("tests.bench.models", names, given, measure_all)
    if rows is not None and given.json:
        versions = {"transformers": transformers.__version__}
        command = "python3 -m tests.bench.models" + " --small" * given.small
        command += " --others" * given.others
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
