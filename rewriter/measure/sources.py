"""Looks up the measurement of a key: given, cached, shipped; near shapes and chips."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax

from rewriter.config import Config
from rewriter.errors import CacheWarning, ConfigError, caller
from rewriter.measure import cache
from rewriter.measure.family import carried_over, relatives
from rewriter.measure.key import Key, nearest
from rewriter.measure.measurement import Entry, Measurement
from rewriter.measure.serialized import Found, read_all
from rewriter.measure.tuned import Tuned
from rewriter.ops.device import Device
from rewriter.ops.registry import package_of, registry
from rewriter.support import regular_files

Source = tuple[str, Sequence[Entry]]

NEAREST = "nearest"
"""The origin of measurements of near shapes, or of another chip of the family."""


def sources(config: Config, device: Device, op: str) -> list[Source]:
    """Where measurements of a device may be found, the strongest first."""
    kind = device.kind
    found: list[Source] = [("tuned", _given(t).entries) for t in config.tuned[::-1]]
    if config.tune != "off":
        found += _cached(kind, op)
    own: list[Source] = [(name, _own(es, kind)) for name, es in found]
    near: list[Source] = [(NEAREST, tuple(carried_over(es, kind))) for _, es in found]
    if config.tune != "off":
        ours, others = _shipped_for(op, kind)
        own.append(("shipped", ours))
        near.append((NEAREST, others))
    return [(name, entries) for name, entries in (*own, *near) if entries]


def _cached(kind: str, op: str) -> list[Source]:
    """What this machine measured."""
    if jax.process_count() > 1:  # all hosts must compile one program
        return []
    mine = cache.entries(kind, op)
    here = [(k, tuple(m for m in ms if m.jax == jax.__version__)) for k, ms in mine]
    return [("cached", [(k, ms) for k, ms in here if ms])]


def _own(entries: Sequence[Entry], kind: str) -> tuple[Entry, ...]:
    """The measurements that were made on a device kind."""
    return tuple(e for e in entries if e[0].device == kind)


@functools.lru_cache(maxsize=256)
def _shipped_for(op: str, kind: str) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """What comes with the package: measured on a device kind, and on its relatives."""
    entries = shipped(op, kind).entries
    return _own(entries, kind), tuple(carried_over(entries, kind))


def look_up(
    sources: Sequence[Source], key: Key, holds: Callable[[Measurement], bool]
) -> tuple[tuple[Measurement, ...], str]:
    """The measurements of a key, else of the nearest shapes, and their origin.

    Those of these shapes on another chip come before those of other shapes.
    """
    for origin, entries in sources:
        found = tuple(filter(holds, dict(entries).get(key, ())))
        if found:
            return found, origin
    equal = tiled_axes(key.op)
    for _, entries in sources:
        found = tuple(filter(holds, nearest(entries, key, equal)))
        if found:
            return found, NEAREST
    return (), ""


def tiled_axes(op: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the axes of which tiles take the whole, by operand; see `Op.tiled`.

    Example:
        >>> tiled_axes("attention")["q"]
        (3,)
    """
    if op not in registry().ops():
        return {}
    declared = registry().op(op)
    letters = set(declared.tiled.split())
    axes = {o.name: o.axes.split() for o in declared.operands}
    found = {
        name: tuple(i for i, x in enumerate(of) if x in letters)
        for name, of in axes.items()
    }
    return {name: at for name, at in found.items() if at}


def check_tuned(config: Config) -> None:
    """Reads the files of measurements that a configuration names.

    Raises:
        ConfigError: If one cannot be read.
        BundleMismatch: If one holds something else.
    """
    for tuned in config.tuned:
        _given(tuned)


def _given(tuned: object) -> Tuned:
    if isinstance(tuned, Tuned):
        return tuned.check("tuned=")
    path = str(tuned)
    try:
        return _loaded(path, os.stat(path).st_mtime_ns)
    except OSError as problem:
        raise ConfigError(
            f"tuned={path!r} cannot be read: {problem.strerror}",
            wanted="a file that Tuned.save wrote",
            where=caller(),
        ) from problem


@functools.lru_cache(maxsize=64)
def _loaded(path: str, stamp: int) -> Tuned:
    del stamp
    return Tuned.load(path, source=f"tuned={path!r}")


@functools.cache
def shipped(op: str, kind: str = "") -> Tuned:
    """Returns the measurements that come with the package.

    Args:
        op: The op.
        kind: A device kind. Files of chips that say nothing about it are not read: all
            take 20 ms. Without it, all are.
    """
    try:
        module = importlib.import_module(package_of(op))
    except ModuleNotFoundError:
        return Tuned()
    folder = os.path.join(os.path.dirname(str(module.__file__)), "tuned")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    tuned = Tuned()
    for name in names:
        if name.endswith(".json") and _may_serve(name, kind):
            tuned |= _shipped(os.path.join(folder, name))
    return Tuned(tuple((key, ms) for key, ms in tuned.entries if key.op == op))


def _may_serve(name: str, kind: str) -> bool:
    """Whether a file, which is named after its chip, may say something about a chip."""
    chips = (kind, *relatives(kind))
    return any(name.startswith(chip.lower().replace(" ", "_")) for chip in chips)


def _shipped(name: str) -> Tuned:
    """A file of the package; wrong records in it are reported and ignored."""
    try:
        found = read_all(regular_files.read_text(name))
    except (OSError, ValueError) as problem:
        found = Found((), (f"{type(problem).__name__}: {problem}",))
    if found.problems:
        text = f"{name} is ignored: {found.problems_text}. Install the package again"
        warnings.warn(text, CacheWarning, stacklevel=2)
    return Tuned(found.entries)
