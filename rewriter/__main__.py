"""The command line: ``python -m rewriter demo | explain file.py:fn | ...``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import jax

import rewriter
from rewriter import errors
from rewriter._jax import tpu_is_attached
from rewriter.config import CHOICES
from rewriter.ops.registry import registry
from rewriter.patterns.index import PATTERNS
from rewriter.reports.difference import difference
from rewriter.reports.report import ASCII
from rewriter.support.installed import require_package
from rewriter.support.requirement import requirements
from rewriter.tools import targets
from rewriter.tools.stored_reports import report_of

GOOD, BAD, MISTAKE = 0, 1, 2
"""Exit statuses. `BAD`: the result is not good, or could not be found. `MISTAKE`: the
command line names something that does not exist, as for argparse."""

MISTAKES = (
    errors.ConfigError, errors.UnknownPattern, errors.UnknownKernel,
    errors.BundleMismatch,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status.

    Args:
        argv: Arguments without the program's name; ``sys.argv`` by default.

    Returns:
        `GOOD`, `BAD` or `MISTAKE`.

    Raises:
        SystemExit: With `MISTAKE`, for a command line that cannot be parsed.
    """
    args = _parser().parse_args(argv)
    _keep_libtpu_silent()
    try:
        with targets.user_path():
            return int(args.run(args) or GOOD)
    except errors.RewriterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return MISTAKE if isinstance(error, MISTAKES) else BAD


# ----------------------------------------------------------------- commands
def _demo(args: argparse.Namespace) -> int:
    require_package("flax", "demo")
    from rewriter.tools import demo

    fn, values = demo.build(demo.SMALL if args.small else demo.Size())
    say = _say(args)
    say("A transformer of flax's own layers; nothing in it knows about rewriter.\n")
    say(rewriter.explain(fn)(*values))
    checked = rewriter.verify(fn, grad=True)(*values)
    say(f"\n{checked}\n")
    measured = rewriter.benchmark(fn, pairs=args.pairs)(*values)
    say(f"{measured}\n")
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "demo.stablehlo")
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
    artifact = rewriter.export(fn)(*specs)
    artifact.save(path)
    names = ", ".join(artifact.manifest["platforms"])
    say(f"wrote {path} ({len(artifact.data):,} bytes; {names}) and its manifest")
    _json(args, {"report": checked.report.as_dict(), "verify": _loads(checked),
                 "benchmark": _loads(measured), "artifact": path})  # fmt: skip
    return 0 if checked.ok else 1


def _explain(args: argparse.Namespace) -> int:
    if args.all:
        return _explain_all(args)
    fn, values = _target(args)
    report = rewriter.explain(fn, **_options(args))(*values)
    _say(args)(report)
    data = report.as_dict()
    if args.html:
        path = data["html"] = os.path.abspath(args.html)
        with _writing("--html", path):
            report.html(path)
        _say(args)(f"\nwrote {path}; open it in a browser")
    _json(args, data)
    return GOOD


def _explain_all(args: argparse.Namespace) -> int:
    """Explains every function that has arguments beside it, of a file or a folder."""
    if args.html or args.args:
        raise errors.ConfigError(
            "--all with --html or --args", next_step="Name one function for these"
        )
    files, reports, failed = targets.files(args.function), [], {}

    def left_out(what: str, problem: Exception) -> None:
        failed[what] = f"{type(problem).__name__}: {problem}"
        _say(args)(f"{what} was left out: {failed[what]}\n")

    for file in files:
        try:
            functions = targets.every_function(file)
        except Exception as problem:
            if files == [args.function]:
                raise
            left_out(file, problem)
            continue
        for name, fn, values in functions:
            try:
                reports.append(rewriter.explain(fn, **_options(args))(*values))
                _say(args)(f"{reports[-1]}\n")
            except Exception as problem:
                left_out(f"{file}:{name}", problem)
    data = {"reports": [report.as_dict() for report in reports]}
    _json(args, data | ({"failed": failed} if failed else {}))
    return BAD if failed else GOOD


def _diff(args: argparse.Namespace) -> int:
    before, after = (report_of(path) for path in (args.before, args.after))
    found = difference(before, after)
    _say(args)(found)
    _json(args, found.as_dict())
    return BAD if found else GOOD


@contextmanager
def _writing(option: str, path: str) -> Iterator[None]:
    """Says which option named a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise errors.ConfigError(
            f"{option} {path}: {error.strerror}",
            next_step="Name a file in a folder that exists",
        ) from error


def _verify(args: argparse.Namespace) -> int:
    fn, values = _target(args)
    result = rewriter.verify(fn, grad=args.grad, **_options(args))(*values)
    _say(args)(result)
    _json(args, _loads(result))
    return 0 if result.ok else 1


def _tune(args: argparse.Namespace) -> int:
    fn, values = _target(args)
    run = rewriter.tune(
        fn,
        level=args.level,
        budget_s=args.budget,
        grad=args.grad,
        again=args.again,
        end_to_end=args.end_to_end,
        isolate=args.isolate,
        **_options(args),
    )
    tuned = run(*values)
    _say(args)(tuned)
    if args.out:
        tuned.save(args.out)
        _say(args)(f"\nwrote {args.out}; use it with optimize(fn, tuned={args.out!r})")
    _json(args, json.loads(tuned.dumps()))
    return 0


def _cache(args: argparse.Namespace) -> int:
    if args.action == "path":
        found: Any = rewriter.cache.path()
    elif args.action == "clear":
        found = {"removed": rewriter.cache.clear(op=args.op, device=args.device)}
    else:
        found = rewriter.cache.info()
    _say(args)(f"removed {found['removed']} files" if args.action == "clear" else found)
    _json(args, asdict(found) if args.action == "info" else found)
    return 0


def _bench(args: argparse.Namespace) -> int:
    if not args.function:
        return _bench_ops(args)
    _none_of(args, OF_OPS, f"with {args.function}", "It is for ops: leave it out")
    fn, values = _target(args)
    run = rewriter.benchmark(
        fn, mode=args.mode, pairs=args.turns or 10, **_options(args)
    )
    result = run(*values)
    _say(args)(result)
    _write(args, result.json())
    _json(args, _loads(result))
    return 0


OF_OPS = ("op", "shapes", "implementations", "peers", "plot")
OF_FUNCTION = ("args", "patterns", "numerics", "assume", "target", "require", "tuned")


def _none_of(
    args: argparse.Namespace, names: Sequence[str], where: str, then: str
) -> None:
    for name in names:
        if getattr(args, name):
            raise errors.ConfigError(f"--{name} {where}", next_step=then)


def _bench_ops(args: argparse.Namespace) -> int:
    from rewriter.ops import device
    from rewriter.tools import bench_ops, roofline

    _none_of(args, OF_FUNCTION, "without a function", "Name it: bench module:function")
    if args.plot:
        require_package("matplotlib", "plot")
    on = device.attached()
    shapes = args.shapes or ("small" if on.platform == "cpu" else "targets")
    names = _listed(args.op) or list(registry().ops())
    result = bench_ops.bench_ops(
        [use for name in names for use in bench_ops.named_uses(name, shapes)],
        implementations=_listed(args.implementations),
        mode=args.mode,
        turns=args.turns,
        peers=args.peers,
        say=_say(args),
    )
    if args.plot:
        roofline.plot(result.points(), on, args.plot)
        _say(args)(f"\nwrote {args.plot}")
    _write(args, result.json())
    _json(args, result.as_dict())
    return 1 if any(r.reason.startswith("wrong") for r in result.rows) else 0


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _write(args: argparse.Namespace, text: str) -> None:
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def _export(args: argparse.Namespace) -> int:
    fn, values = _target(args)
    platforms = tuple(args.platforms.split(","))
    run = rewriter.export(fn, platforms=platforms, **_options(args))
    artifact = run(*values)
    artifact.save(args.out)
    _say(args)(f"wrote {args.out} and {args.out}.manifest.json")
    _json(args, dict(artifact.manifest))
    return 0


def _env(args: argparse.Namespace) -> int:
    import importlib.metadata as metadata

    found = {
        "rewriter": rewriter.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "cpus": os.cpu_count(),
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("REWRITER_", "JAX_"))
        },
    }
    for name in ("jax", "jaxlib", "numpy", "networkx", "flax", "equinox"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    _say(args)("\n".join(f"{k:<12} {v}" for k, v in found.items()))
    _json(args, found)
    return 0


def _patterns(args: argparse.Namespace) -> int:
    table = {name: PATTERNS[name].about for name in sorted(PATTERNS)}
    width = max((len(name) for name in table), default=0)
    _say(args)("\n".join(f"{name:<{width}}  {text}" for name, text in table.items()))
    _json(args, table)
    return 0


def _kernels(args: argparse.Namespace) -> int:
    rows = [
        {"op": op, "kernel": k.name, "platforms": k.platforms, "version": k.version,
         "memory_bounded": k.traits.memory_bounded}
        for op in registry().ops()
        for k in registry().kernels(op)
    ]  # fmt: skip
    lines = [
        f"{r['op']:<22} {r['kernel']:<18} {','.join(r['platforms']):<20} "
        f"version {r['version']}{'  memory-bounded' * bool(r['memory_bounded'])}"
        for r in rows
    ]
    _say(args)("\n".join(lines))
    _json(args, rows)
    return 0


# ------------------------------------------------------------------ helpers
WITHOUT_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu looks for when JAX starts; it prints errors where it finds none."""


def _keep_libtpu_silent() -> None:
    """Where libtpu is installed and no TPU is, gives it what it looks for.

    JAX finds no TPU all the same, and libtpu compiles the same programs.
    """
    if not tpu_is_attached():
        for name, value in WITHOUT_TPU.items():
            os.environ.setdefault(name, value)


def _say(args: argparse.Namespace) -> Callable[[object], None]:
    def say(thing: object) -> None:
        text = str(thing)
        if not args.json:
            print(text.translate(ASCII) if args.ascii else text, flush=True)

    return say


def _json(args: argparse.Namespace, value: object) -> None:
    if args.json:
        print(json.dumps(value, indent=1, default=str))


def _loads(result: Any) -> Any:
    return json.loads(result.json())


def _target(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The function to look at, and its arguments."""
    fn, values, found = targets.function_and_arguments(args.function, args.args)
    if found:
        _say(args)(f"arguments: {found}\n")
    return fn, values


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("patterns", "numerics", "target", "tuned")
    found = {n: getattr(args, n) for n in names if getattr(args, n)}
    if args.assume:
        found["assume"] = args.assume.split(",")
    if args.require:
        found["require"] = _requirement(args.require)
    return found


REQUIRE = "attention, all, or attention=24,rms_norm.found=2"


def _requirement(text: str) -> Any:
    """What must be replaced, or with ``.found`` only recognised."""
    if "=" not in text:
        return text if "," not in text else dict.fromkeys(text.split(","), 1)
    found: dict[str, dict[str, int]] = {}
    try:
        for part in text.split(","):
            name, count = part.split("=")
            op, _, kind = name.strip().partition(".")
            found.setdefault(op, {})[kind or "replaced"] = int(count)
        return requirements(found)
    except ValueError:
        raise errors.ConfigError(f"--require {text}", wanted=REQUIRE) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rewriter", description=__doc__)
    version = f"rewriter {rewriter.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = _command(commands, "demo", _demo, "a real transformer, before and after")
    demo.add_argument("--out", default="rewriter_demo", help="folder for the artifact")
    demo.add_argument("--small", action="store_true", help="a few seconds only")
    demo.add_argument("--pairs", type=int, default=3, help="runs of each program")
    explain = _on_function(commands, "explain", _explain, "what would be rewritten")
    explain.add_argument("--html", help="also write a page with a picture")
    every = "explain each function with arguments beside it, of a file or a folder"
    explain.add_argument("--all", action="store_true", help=every)
    diff = _command(commands, "diff", _diff, "what is not the same in two reports")
    diff.add_argument("before", help="what explain --json wrote")
    diff.add_argument("after", help="the same, later")
    verify = _on_function(commands, "verify", _verify, "compare with what is written")
    verify.add_argument("--grad", action="store_true", help="gradients as well")
    _bench_options(_on_function(commands, "bench", _bench, BENCH, optional=True))
    tune = _on_function(commands, "tune", _tune, "measure the kernels of every site")
    tune.add_argument("--level", default="full", help="full, or quick")
    tune.add_argument("--budget", type=float, default=600.0, help="seconds")
    tune.add_argument("--grad", action="store_true", help="gradients as well")
    tune.add_argument("--again", action="store_true", help="also what is cached")
    tune.add_argument("--end-to-end", action="store_true", help="the whole program too")
    tune.add_argument(
        "--isolate", action="store_true", help="try kernels in a child process first"
    )
    tune.add_argument("--out", help="also write the measurements to this file")
    cache = _command(commands, "cache", _cache, "what was measured on this machine")
    cache.add_argument("action", choices=("path", "info", "clear"))
    cache.add_argument("--op", help="clear only this op's")
    cache.add_argument("--device", help="clear only this device kind's")
    export = _on_function(commands, "export", _export, "write a StableHLO artifact")
    export.add_argument("--platforms", default="cpu,cuda,tpu")
    export.add_argument("--out", required=True, help="the file to write")
    _command(commands, "patterns", _patterns, "the patterns there are")
    _command(commands, "kernels", _kernels, "the kernels there are")
    _command(commands, "env", _env, "versions, for a bug report")
    return parser


ARGUMENTS = (
    "a tuple of arguments, or a function that makes it: module:name, file.py:name, or "
    "a name in the function's file; by default <function>_args, example_args or args"
)
BENCH = "time and temporary memory, of a function or, without one, of ops' kernels"


def _bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--mode",
        default="both",
        help="forward, vjp (gradients alone), forward_and_vjp, or both: the first and "
        "the last",
    )
    bench.add_argument("--turns", "--pairs", type=int, help="samples of each program")
    bench.add_argument("--out", help="a JSON file to write")
    ops = bench.add_argument_group("without a function")
    ops.add_argument("--op", help="such as attention,rms_norm; all by default")
    ops.add_argument("--shapes", help="small, for a CPU, or targets, for a GPU")
    ops.add_argument("--implementations", help="such as xla,memory_bounded")
    ops.add_argument("--peers", action="store_true", help="tokamax and torch as well")
    ops.add_argument("--plot", help="a roofline plot to write, .png or .svg")


def _command(
    commands: Any, name: str, run: Callable[..., int], text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--ascii", action="store_true", help="ASCII symbols only")
    command.set_defaults(run=run)
    return command  # type: ignore[no-any-return]


def _on_function(
    commands: Any,
    name: str,
    run: Callable[..., int],
    text: str,
    optional: bool = False,
) -> argparse.ArgumentParser:
    command = _command(commands, name, run, text)
    number = "?" if optional else None
    command.add_argument(
        "function", nargs=number, help="module:function, or file.py:function"
    )
    command.add_argument("--args", help=ARGUMENTS)
    command.add_argument("--patterns", help="such as --patterns=-rms_norm")
    command.add_argument("--numerics", choices=CHOICES["numerics"])
    command.add_argument("--assume", help="what need not be proved, such as finite")
    command.add_argument("--target", help="device kind to build for, such as h200")
    command.add_argument("--tuned", help="a file of measurements to choose by")
    command.add_argument("--require", help=REQUIRE)
    return command


if __name__ == "__main__":
    sys.exit(main())
