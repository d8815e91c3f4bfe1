"""Our norms on a Hopper GPU against XLA's, config by config, checked with float64.

  python3 -m tests.bench.hopper_norms [--configs N] [--cases "A;B"] [--passes "A;B"]
      [--json PATH]

Device time by CUPTI, of all kernels of a program, medians of runs that take turns on
three sets of normal bfloat16 inputs; compiling and first runs are left out. A forward
gives the result; gradients, from rows and a cotangent, those of every operand; both
give all of that. TB/s count arrays of rows that are read or written once: 2, 3 and 5.
Errors are those of the worst output against float64, in the Frobenius norm. "xla,
hopper" has XLA's forward and our gradients.

"sum", "sum gradients" and "sum both" are the same in a residual stream: the norm of x +
addend, where the sum is a result too. Its gradients are added to what comes back along
that sum. They read and write 4, 4 and 8 arrays of rows. "apart" has our kernels and
XLA's additions, and "rewritten" is XLA's program as `rewriter.optimize` leaves it with
our kernels.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter.hardware import timing
from rewriter.kernels.norms import hopper_config
from rewriter.kernels.shared import hopper
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from rewriter.site.implementation import settings
from tests.bench import record

SHAPES = ((16384, 4096), (8192, 8192), (65536, 1024), (4096, 16384))
OPERANDS = {"rms_norm": ("x", "scale"), "layer_norm": ("x", "scale", "bias")}
CASES = {f"{op} {m}x{d}": (op, m, d) for m, d in SHAPES for op in OPERANDS}
"""(op, rows, columns) by name."""

MOVED = {"forward": 2, "gradients": 3, "both": 5,
         "sum": 4, "sum gradients": 4, "sum both": 8}  # fmt: skip
"""How often an array of rows is read or written at least."""

PARAMS = {"eps": 1e-6}
SETS, TURNS, MOST_ERROR = 3, 20, 5e-3


def operands(op: str, m: int, d: int, seed: int) -> list[jax.Array]:
    """Returns x, scale, bias as the op has them, and a cotangent: bfloat16."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
    made = {"x": normal(keys[0], (m, d)), "scale": 1 + normal(keys[1], (d,)) / 8,
            "bias": normal(keys[2], (d,)) / 8}  # fmt: skip
    return [*(made[n] for n in OPERANDS[op]), normal(keys[3], (m, d))]


def plain(op: str) -> dict[str, Callable[..., Any]]:
    """Returns functions of operands and a cotangent, by pass: the op as written."""
    names, run = OPERANDS[op], registry().op(op).reference

    def forward(*given: Any) -> Any:
        return run(**dict(zip(names, given[:-1], strict=True)), **PARAMS)

    def gradients(*given: Any) -> Any:
        return jax.vjp(lambda *x: forward(*x, None), *given[:-1])[1](given[-1])

    def both(*given: Any) -> Any:
        out, back = jax.vjp(lambda *x: forward(*x, None), *given[:-1])
        return out, *back(given[-1])

    return {"forward": forward, "gradients": gradients, "both": both}


def ours(op: str, forward: Any, backward: Any) -> dict[str, Callable[..., Any]]:
    """Returns the same by the kernel; its configs, of which None stands for XLA."""
    names, its, xla = OPERANDS[op], registry().kernel(op, "hopper"), plain(op)

    def run(*given: Any) -> Any:
        if forward is None:
            return xla["forward"](*given)
        named = dict(zip(names, given[:-1], strict=True))
        return its.forward(**named, **PARAMS, config=forward)

    def gradients(*given: Any) -> Any:
        named = dict(zip(names, given[:-1], strict=True))
        assert its.backward is not None
        made = its.backward(
            **named, **PARAMS, out=None, residuals=(), cotangent=given[-1],
            config=backward,
        )  # fmt: skip
        return tuple(made[n] for n in names)

    both = lambda *given: (run(*given), *gradients(*given))
    return {"forward": run, "gradients": gradients, "both": both}


def candidates(
    op: str, m: int, d: int, most: int
) -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns functions of operands and a cotangent by (pass, name)."""
    its, on = registry().kernel(op, "hopper"), device.attached()
    given = jax.eval_shape(lambda: operands(op, m, d, 0))[:-1]
    spec = spec_of(
        registry().op(op), dict(zip(OPERANDS[op], given, strict=True)), PARAMS
    )
    forward, _ = worth_measuring(its.space, spec, on, most)
    backward, _ = worth_measuring(its.backward_space, spec, on, most)
    made = {(name, "xla"): run for name, run in plain(op).items()}
    for config in forward:
        made["forward", _text(config)] = ours(op, config, backward[0])["forward"]
    for config in backward:
        made["gradients", _text(config)] = ours(op, None, config)["gradients"]
    made["both", "hopper"] = ours(op, forward[0], backward[0])["both"]
    made["both", "xla, hopper"] = ours(op, None, backward[0])["both"]
    return made


# ------------------------------------------------------------- in a residual stream
def sum_operands(op: str, m: int, d: int, seed: int) -> list[jax.Array]:
    """Returns x, addend, scale, bias as the op has them, two cotangents: bfloat16.

    They are those of the norm, and of the sum.
    """
    x, *given, cotangent = operands(op, m, d, seed)
    addend, _, *_, passing = operands(op, m, d, seed + SETS)
    return [x, addend, *given, cotangent, passing]


def plain_sums(op: str) -> dict[str, Callable[..., Any]]:
    """Returns functions of `sum_operands`, by pass: as written."""
    names, run = OPERANDS[op], registry().op(op).reference

    def norm(*given: Any) -> Any:
        return run(**dict(zip(names, given, strict=True)), **PARAMS)

    def total(x: Any, addend: Any, *given: Any) -> Any:
        return x + addend, norm(x + addend, *given)

    def forward(*given: Any) -> Any:
        return total(*given[:-2])

    def gradients(x: Any, addend: Any, *given: Any) -> Any:
        """Those of a norm of x: the addend is not read."""
        *given, cotangent, passing = given
        dx, *rest = jax.vjp(norm, x, *given)[1](cotangent)
        return dx + passing, *rest

    def both(*given: Any) -> Any:
        (h, out), back = jax.vjp(total, *given[:-2])
        dx, _, *rest = back((given[-1], given[-2]))
        return h, out, dx, *rest

    return {"sum": forward, "sum gradients": gradients, "sum both": both}


def our_sums(
    op: str, forward: Any, backward: Any, apart: bool = False
) -> dict[str, Callable[..., Any]]:
    """Returns the same by the kernel and its configs; `apart`, XLA adds."""
    names, its = OPERANDS[op][1:], registry().kernel(op, "hopper")

    def run(x: Any, addend: Any, *given: Any) -> Any:
        named = dict(zip(names, given, strict=False))
        if apart:
            x = x + addend
            return x, its.forward(x=x, **named, **PARAMS, config=forward)
        return its.forward(x=x, addend=addend, **named, **PARAMS, config=forward)

    def gradients(x: Any, addend: Any, *given: Any) -> Any:
        del addend
        named = dict(zip(names, given, strict=False))
        more = {} if apart else {"addend": given[-1]}
        made = its.backward(
            x=x, **named, **PARAMS, out=None, residuals=(), cotangent=given[-2],
            config=backward, **more,
        )  # fmt: skip
        dx = made["x"] + given[-1] if apart else made["x"]
        return dx, *(made[n] for n in names)

    def both(x: Any, addend: Any, *given: Any) -> Any:
        h, out = run(x, addend, *given)
        return h, out, *gradients(h, addend, *given)

    return {"sum": run, "sum gradients": gradients, "sum both": both}


def sum_candidates(
    op: str, m: int, d: int, most: int
) -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns functions of `sum_operands` by (pass, name)."""
    x, _, *given, _, _ = jax.eval_shape(lambda: sum_operands(op, m, d, 0))
    named = dict(zip(OPERANDS[op][1:], given, strict=True))
    programs = hopper.processors(device.attached())
    forward, backward = (
        hopper_config.proposed(
            hopper_config.norm_of(op == "layer_norm", x, None, 0.0, named, True),
            is_backward,
            programs,
        )[:most]
        for is_backward in (False, True)
    )
    xla = plain_sums(op)
    made = {(name, "xla"): run for name, run in xla.items()}
    for config in forward:
        made["sum", _text(config)] = our_sums(op, config, None)["sum"]
    for config in backward:
        run = our_sums(op, None, config)["sum gradients"]
        made["sum gradients", _text(config)] = run
    for name, run in our_sums(op, None, None, apart=True).items():
        made[name, "apart"] = run
    made["sum both", "hopper"] = our_sums(op, None, None)["sum both"]
    for name, run in xla.items():
        fast = rewriter.optimize(run, implementation={op: "hopper"}, require=op)
        made[name, "rewritten"] = fast
    return made


def exact_sums(op: str, given: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the results of all passes in float64, on the device."""
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in given]
        return {name: jax.jit(run)(*wide) for name, run in plain_sums(op).items()}


# ------------------------------------------------------------------------ measuring
def _text(config: Any) -> str:
    return ", ".join(f"{n} {v}" for n, v in settings(config) or ())


def compiled(run: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Returns the compiled program, or why there is none."""
    try:
        return jax.jit(run).lower(*given).compile()
    except Exception as problem:
        return str(problem).splitlines()[0][:200]


def exact(op: str, given: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the results of all passes in float64, on the device."""
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in given]
        out = jax.jit(plain(op)["both"])(*wide)
    return {"forward": out[:1], "gradients": out[1:], "both": out}


@jax.jit
def _error(made: Any, wanted: Any) -> Any:
    norm = lambda x: jnp.sqrt(jnp.sum(x * x))
    return norm(made.astype(wanted.dtype) - wanted) / norm(wanted)


def error_of(made: Any, wanted: Any) -> float:
    """Returns the worst relative error of several arrays, NaN if one is."""
    made = made if isinstance(made, tuple) else (made,)
    with jax.enable_x64(True):
        found = [_error(a, b) for a, b in zip(made, wanted, strict=True)]
        return float(jnp.max(jnp.stack(found)))


PASSES = {
    ("forward", "gradients", "both"): (operands, exact, candidates),
    ("sum", "sum gradients", "sum both"): (sum_operands, exact_sums, sum_candidates),
}
"""Inputs, exact results and programs, by passes."""


def measured(name: str, most: int, passes: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row for each pass and candidate of a case, the fastest first."""
    rows = []
    for group, its in PASSES.items():
        if wanted := [p for p in group if p in passes]:
            rows += _measured(name, most, wanted, *its)
    return rows


def _measured(
    name: str,
    most: int,
    passes: Sequence[str],
    inputs: Any,
    exactly: Any,
    programs_of: Any,
) -> list[dict[str, Any]]:
    op, m, d = CASES[name]
    sets = [inputs(op, m, d, seed) for seed in range(SETS)]
    wanted = exactly(op, sets[0])
    every = programs_of(op, m, d, most)
    runs = {key: run for key, run in every.items() if key[0] in passes}
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda run: compiled(run, sets[0]), runs.values()))
    rows, programs = [], []
    for (which, by), program in zip(runs, made, strict=True):
        row: dict[str, Any] = {"case": name, "pass": which, "by": by}
        rows.append(row)
        if isinstance(program, str):
            row["failed"] = program
            continue
        error = error_of(program(*sets[0]), wanted[which])
        row["error"] = float(f"{error:.2e}")
        if not error <= MOST_ERROR:
            row["failed"] = "wrong"
            continue
        programs.append((row, program))
    del wanted
    times = timing.measure([p for _, p in programs], sets, TURNS)
    for (row, _), t in zip(programs, times, strict=True):
        moved = 2 * m * d * MOVED[row["pass"]]
        row |= {
            "us": round(1e6 * t.median, 1), "sigma_us": round(1e6 * t.sigma, 1),
            "tb_s": round(moved / t.median / 1e12, 2), "kernels": list(t.kernels),
        }  # fmt: skip
    return sorted(rows, key=lambda r: (r["pass"], r.get("us", float("inf"))))


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=1)
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--passes", default=";".join(MOVED))
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        found = measured(name, given.configs, given.passes.split(";"))
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
        if given.json:  # what is there, should time run out
            command = f"python3 -m tests.bench.hopper_norms --configs {given.configs}"
            if given.passes != ";".join(MOVED):
                command += f' --passes "{given.passes}"'
            record.write(given.json, command, sets=SETS, turns=TURNS, rows=rows)


if __name__ == "__main__":
    main()
