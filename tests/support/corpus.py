"""Counts what is found in a folder of public models, also in checkpointed layers.

    PYTHONPATH=. python3 -m tests.support.corpus FOLDER [--grad] [--remat] [--force]

The folder holds a package `corpus` of adapters: each entry of `corpus.common.REGISTRY`
builds ``(fn, args)`` and says how many sites were counted by hand in its forward.

With ``--remat`` the program is cut behind sums where one array of floats is all that
goes on, as between two layers. Each part is put under `jax.checkpoint`. With
``--force`` all sites are computed by the plain kernels, and numbers are compared with
the program as written.
It prints a line for each entry, and the share of sites that are found.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import rewriter

OPS = {
    "attention": "attention",
    "layernorm": "layer_norm",
    "rmsnorm": "rms_norm",
    "glu": "gated_linear_unit",
    "ragged": "ragged_dot",
}
"""Ops by the names of the corpus."""

FORCED = dict.fromkeys(OPS.values(), "memory_bounded")
LARGE = 64
"""The fewest elements of an array that counts as going on."""


# ------------------------------------------------------------------ checkpoints
def checkpointed(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns the function with each part of it under a checkpoint."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(shape)
    parts = list(_parts(closed.jaxpr))

    def run(*args: Any) -> Any:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
        for part in parts:
            call = jax.checkpoint(core.jaxpr_as_fun(core.ClosedJaxpr(part, ())))
            made = call(*(env[v] for v in part.invars))
            env |= dict(zip(part.outvars, made, strict=True))
        outs = closed.jaxpr.outvars
        return tree.unflatten(
            [v.val if isinstance(v, core.Literal) else env[v] for v in outs]
        )

    return run


def _parts(jaxpr: core.Jaxpr) -> Iterator[core.Jaxpr]:
    """The parts of a program between places where one array goes on."""
    last: dict[Any, int] = {}
    made: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last |= {v: i for v in eqn.invars if not isinstance(v, core.Literal)}
        made |= dict.fromkeys(eqn.outvars, i)
    for v in jaxpr.outvars:
        if not isinstance(v, core.Literal):
            last[v] = len(jaxpr.eqns)
    starts = [0, *_cuts(jaxpr, made, last), len(jaxpr.eqns)]
    for start, end in itertools.pairwise(starts):
        eqns = jaxpr.eqns[start:end]
        own = [v for v in made if start <= made[v] < end and last.get(v, -1) >= end]
        read = dict.fromkeys(
            v
            for eqn in eqns
            for v in eqn.invars
            if not isinstance(v, core.Literal) and not start <= made.get(v, -1)
        )
        yield core.Jaxpr((), tuple(read), tuple(own), eqns)


def _cuts(jaxpr: core.Jaxpr, made: dict[Any, int], last: dict[Any, int]) -> list[int]:
    """The places behind a sum of two arrays that alone is read later."""
    count = len(jaxpr.eqns)
    going = np.zeros(count + 1, int)
    for v, at in made.items():
        if _goes_on(v.aval) and last.get(v, -1) > at:
            going[at + 1 : last[v] + 1] += 1
    spread = {
        v for e in jaxpr.eqns if "broadcast" in str(e.primitive) for v in e.outvars
    }
    found = []
    for i, eqn in enumerate(jaxpr.eqns[:-1]):
        ins = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        joins = str(eqn.primitive) == "add" and len(ins) == 2 and not spread & {*ins}
        like = eqn.outvars[0].aval
        joins = joins and all(v.aval.shape == like.shape for v in ins)
        if joins and _goes_on(like) and going[i + 1] == 1:
            found.append(i + 1)
    return found


def _goes_on(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.size >= LARGE


# ------------------------------------------------------------------------ entries
def counted(entry: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns expected and found sites by op, and how far numbers are off."""
    from corpus import common

    fn, args = entry.build()
    fn = checkpointed(fn, *args) if options.remat else fn
    f = common.grad_fn(entry, fn) if options.grad else fn
    forced = FORCED if options.force else {}
    report = rewriter.explain(f, implementation=forced)(*args)
    found = report.counts(repeats=False, backward=options.grad)
    sites = entry.sites.as_dict()
    expected = {OPS[name]: sites[name] for name in OPS}
    # A unit inside of experts may be a site of its own, or part of the ragged one.
    spare = {"gated_linear_unit": sites["moe_glu"]}
    error = None
    if options.force:
        fast = rewriter.optimize(f, implementation=forced)
        error = _error(fast(*args), jax.jit(f)(*args))
    return {"expected": expected, "found": found, "spare": spare, "error": error}


def _error(got: Any, want: Any) -> float:
    """The largest relative error of a leaf; 1 is that of bfloat16's rounding."""
    worst, leaves = 0.0, []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(b.dtype, jnp.floating):
            continue
        x, y = (np.asarray(v).astype(np.float64) for v in (a, b))
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return np.inf
        kept = np.isfinite(y)
        leaves.append((b.dtype, (x - y)[kept], np.linalg.norm(y[kept])))
    # A gradient that is zero but for rounding is measured against the others.
    floor = 0.01 * max((float(size) for _, _, size in leaves), default=0.0)
    narrow = any(dtype.itemsize < 4 for dtype, _, _ in leaves)
    limit = 3e-2 if narrow else 1e-4
    for _, off, size in leaves:
        size = max(float(size), floor, 1e-30)
        worst = max(worst, float(np.linalg.norm(off)) / size / limit)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns how many entries fail or have wrong numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the package `corpus` is")
    parser.add_argument("globs", nargs="*", default=["*"])
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--force", action="store_true")
    options = parser.parse_intermixed_args(argv)
    sys.path.insert(0, options.folder)
    from corpus import common, models  # noqa: F401 (models fill the registry)

    total = {op: [0, 0] for op in OPS.values()}
    bad = skipped = 0
    for name, entry in common.REGISTRY.items():
        if not any(fnmatch.fnmatch(name, g) for g in options.globs):
            continue
        if options.grad and not entry.grad:
            skipped += 1
            continue
        try:
            row = counted(entry, options)
        except common.Skip:
            skipped += 1
            continue
        except Exception:
            bad += 1
            text = traceback.format_exc().strip().splitlines()[-1]
            print(f"{name:40s} failed: {text[:120]}", flush=True)
            continue
        jax.clear_caches()
        cells = []
        for op, want in row["expected"].items():
            have = row["found"].get(op, 0)
            total[op][0] += want
            total[op][1] += min(want, have)
            if want or have:
                mark = "<" if have < want else ""
                more = have - want - row["spare"].get(op, 0)
                cells.append(f"{op} {have}/{want}{mark}{' +' if more > 0 else ''}")
        off = row["error"]
        wrong = off is not None and not off <= 1
        bad += wrong
        tail = "" if off is None else f"  error {off:.1e}{' WRONG' if wrong else ''}"
        print(f"{name:40s} {'  '.join(cells)}{tail}", flush=True)
    want, have = (sum(t[k] for t in total.values()) for k in range(2))
    print("  ".join(f"{op} {t[1]}/{t[0]}" for op, t in total.items()))
    share = 100 * have / max(want, 1)
    print(f"{share:.1f}% of {want} sites, {skipped} skipped, {bad} bad")
    return bad


if __name__ == "__main__":
    sys.exit(main())
