"""Writes what the rewriter does to many programs, to compare before and after a change.

    python -m tests.support.freeze write FOLDER [--only GLOB] [--part I/N] [--jobs N]
                                                [--corpus] [--kernels]
    python -m tests.support.freeze compare BEFORE AFTER

``write`` makes one file for each spelling, and for each public model with ``--corpus``
(which needs the package ``corpus`` on the path). A file holds four forms of the
program: forward, gradient, sharded over two devices, and exported. Each form has the
report as JSON, as it is on an H100. It also has the text of the rewritten program, with
kernels of plain JAX forced for every op that has one. Times and addresses are left out.
``--part 2/8`` writes every eighth file from the second on; a file that exists is left.
``--jobs 2`` shares the work between two processes.
With ``--kernels`` there is a file for each use of each op instead: what its kernels say
of it, and the text of what they compute. ``compare`` prints the names whose files
differ, or are in one folder alone, and ends with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests.support.freeze_kernels import kernels

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
PLACE = re.compile(r"/[\w./-]*/(?=(rewriter|kernels|patterns|tests)/)")
MLIR_PLACE = re.compile(r"^#loc.*\n| loc\(.*\)", re.MULTILINE)
LINE = re.compile(r"\.py:\d+")
MODULE = re.compile(r"(?:rewriter|kernels|patterns)(?:[./]\w+)+(?:\.py)?")


def spellings() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    """Yields each spelling's name and what makes its function and arguments."""
    from tests.spellings.corpus import SPELLINGS

    for spelling in SPELLINGS:
        yield spelling.name, lambda s=spelling: (s.fn, s.args())


def models() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    """Yields each public model's name and what makes its function and arguments."""
    from corpus import models as _  # type: ignore[import-not-found]  # noqa: F401
    from corpus.common import REGISTRY  # type: ignore[import-not-found]

    for name, entry in REGISTRY.items():
        yield f"model/{name}", entry.build


@functools.cache
def forced() -> dict[str, tuple[str, ...]]:
    """Returns the kernels that run on any platform, by op; XLA where none can run."""
    from rewriter.ops.registry import registry

    of = registry()
    plain = {
        name: [k.name for k in of.kernels(name) if "cpu" in k.platforms]
        for name in of.ops()
    }
    return {op: (*names[::-1], "xla") for op, names in plain.items() if names}


def forms(fn: Any, args: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Returns the forms of a program: each gives its report and its rewritten text."""
    import jax.numpy as jnp

    import rewriter

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(fn(*args))
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in floats)

    def gradient() -> Any:
        chosen = tuple(
            i
            for i, a in enumerate(args)
            if all(
                jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
                for x in jax.tree.leaves(a)
            )
            and jax.tree.leaves(a)
        )
        return both(jax.grad(loss, chosen), args)

    def both(fn: Any, args: Any) -> Any:
        report = rewriter.explain(fn, target="h100")(*args).as_dict()
        return report, str(rewriter.optimize(fn, implementation=forced()).jaxpr(*args))

    def sharded() -> Any:
        automatic = (jax.sharding.AxisType.Auto,)  # explicit axes refuse many programs
        mesh = jax.make_mesh((2,), ("data",), axis_types=automatic)
        spec = jax.sharding.PartitionSpec

        def place(a: Any) -> Any:
            split = getattr(a, "ndim", 0) and a.shape[0] % 2 == 0
            axes = spec("data") if split else spec()
            return jax.device_put(a, jax.sharding.NamedSharding(mesh, axes))

        return both(fn, jax.tree.map(place, args))

    def exported() -> Any:
        fast = rewriter.optimize(fn, implementation=forced())
        artifact = rewriter.export(fast, platforms="cpu", vjp_order=0)(*args)
        return artifact.manifest, MLIR_PLACE.sub("", artifact.exported.mlir_module())

    return {
        "forward": lambda: both(fn, args),
        "gradient": gradient,
        "sharded": sharded,
        "exported": exported,
    }


def stable(value: Any) -> Any:
    """A report without times, versions and places of files."""
    if isinstance(value, dict):
        left_out = ("seconds", "sha256", "bytes")
        return {k: stable(v) for k, v in value.items() if k not in left_out}
    if isinstance(value, list | tuple):
        return [stable(v) for v in value]
    if isinstance(value, str):
        return text(value)
    return value


def text(program: str) -> str:
    """The text of a program without addresses, lines and names of our modules."""
    for pattern, instead in (
        (ADDRESS, "0x"), (PLACE, ""), (LINE, ".py"), (MODULE, "module"),
    ):  # fmt: skip
        program = pattern.sub(instead, program)
    return program


def frozen(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """What is written of one program, form by form; an error is written as its text."""
    try:
        fn, args = make()
    except Exception as why:
        return {"skipped": f"{type(why).__name__}: {why}"[:300]}
    made: dict[str, Any] = {}
    for name, form in forms(fn, args).items():
        try:
            report, program = form()
            made[name] = {"report": stable(report), "program": text(program)}
        except Exception as why:
            last = traceback.format_exception_only(why)[-1]
            made[name] = {"error": text(last)[:500]}
    return made


def programs(corpus: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the name of each program, and what makes its forms."""
    for name, make in (*spellings(), *(models() if corpus else ())):
        yield name, lambda make=make: frozen(make)


def write(
    folder: pathlib.Path,
    only: str,
    part: tuple[int, int],
    written: Iterator[tuple[str, Callable[[], Any]]],
) -> int:
    """Writes a file for each name that fits; returns how many.

    Args:
        folder: Where to.
        only: A pattern of names.
        part: Every how-manieth of these, from 1 on, and how many parts there are.
        written: Names, and what makes the text of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count, (first, parts) = 0, part
    named = [(n, make) for n, make in written if fnmatch.fnmatch(n, only)]
    for name, make in named[first - 1 :: parts]:
        path = folder / (re.sub(r"[^\w.-]", "_", name) + ".json.z")
        if path.exists():
            continue
        made = json.dumps(make(), indent=1, sort_keys=True, default=repr)
        path.write_bytes(zlib.compress(text(made).encode()))
        count += 1
        if not count % 50:
            jax.clear_caches()  # or each program takes longer than the one before
    return count


def shared(part: str, jobs: int) -> int:
    """Runs this command in several processes, each for some of its files.

    Args:
        part: The part that the command was given.
        jobs: How many processes.

    Returns:
        0 if all of them end well, else 1.
    """
    first, _, parts = part.partition("/")
    here = [sys.executable, "-m", "tests.support.freeze", *sys.argv[1:], "--jobs=1"]
    running = [
        subprocess.Popen(
            [*here, f"--part={int(first) + k * int(parts)}/{int(parts) * jobs}"]
        )
        for k in range(jobs)
    ]
    codes = [p.wait() for p in running]
    return int(any(codes))


def compare(before: pathlib.Path, after: pathlib.Path) -> list[str]:
    """Names of the programs whose files differ, or are in one of the folders alone."""
    names = {p.name for folder in (before, after) for p in folder.glob("*.json.z")}
    return sorted(n for n in names if _read(before / n) != _read(after / n))


def _read(path: pathlib.Path) -> str:
    return zlib.decompress(path.read_bytes()).decode() if path.exists() else ""


def main() -> int:
    """Runs the command of the first docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=pathlib.Path)
    writing.add_argument("--only", default="*")
    writing.add_argument("--part", default="1/1")
    writing.add_argument("--jobs", type=int, default=1)
    writing.add_argument("--corpus", action="store_true")
    writing.add_argument("--kernels", action="store_true")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    given = parser.parse_args()
    if given.command == "write" and given.jobs > 1:
        return shared(given.part, given.jobs)
    if given.command == "write":
        written = kernels() if given.kernels else programs(given.corpus)
        first, _, parts = given.part.partition("/")
        part = int(first), int(parts)
        print(write(given.folder, given.only, part, written), "files written")
        return 0
    different = compare(given.before, given.after)
    print("\n".join(different) or "no program differs")
    return 1 if different else 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    os.environ.setdefault("REWRITER_CACHE_DIR", "/nonexistent")
    sys.exit(main())
