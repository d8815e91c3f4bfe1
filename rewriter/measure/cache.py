"""Keeps tuned choices on disk: one JSON file per key, readable and safe to share.

A file is ``<device>/<op>/<kernel>-<hash>.json`` below `path`. Writing is atomic, and
merges with what other processes wrote meanwhile. Each record is checked by itself
(`schema`). A wrong record, or a file that cannot be read, is reported once and ignored;
the next tuning keeps the file as ``<name>.damaged``. If the folder cannot be written,
choices are kept in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter.errors import CacheWarning
from rewriter.measure.key import Key
from rewriter.measure.measurement import Entry, Measurement, merge
from rewriter.measure.serialized import FORMAT, Found, entry_json, key_json, read_one
from rewriter.measure.tuned import Tuned
from rewriter.support import atomic, cache_folder, regular_files
from rewriter.support.lock import only_writer

LOOKS, LOOK_S = 5, 0.02
"""Without locks, a writer checks that its data is still there: LOOKS times, about
LOOK_S seconds apart. Other processes need some milliseconds to read, merge and
write."""

SETTLED_NS = 2 * 10**9
"""Nanoseconds after which a folder's timestamp surely shows a later change: some file
systems count only seconds."""

REMEDY = "Remove it, or tune again, which replaces it"


@dataclass(frozen=True)
class Info:
    """The content of the cache.

    Attributes:
        path: The folder.
        files: The number of its files.
        nbytes: Their size in bytes.
        counts: ((device, op), keys) pairs.
        unreadable: Files with unusable records, with the reason.
    """

    path: str
    files: int
    nbytes: int
    counts: tuple[tuple[tuple[str, str], int], ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.files} files, {self.nbytes:,} bytes"]
        lines += [f"  {d}  {op}: {n}" for (d, op), n in self.counts]
        lines += [f"  cannot be used: {p}: {why}" for p, why in self.unreadable]
        return "\n".join(lines)


@dataclass
class _Process:
    """State of this process: files read, and records that could not be written."""

    memory: Tuned = field(default_factory=Tuned)
    warned: set[str] = field(default_factory=set)
    read: dict[str, tuple[Any, tuple[Entry, ...]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, entry: Entry) -> None:
        """Remembers an entry that could not be written."""
        with self.lock:
            self.memory |= Tuned((entry,))

    def is_new(self, warning: str) -> bool:
        """Returns whether a warning was not given yet."""
        with self.lock:
            new = warning not in self.warned
            self.warned.add(warning)
        return new


@functools.cache
def _process() -> _Process:
    return _Process()


def path() -> str:
    """Returns the cache's folder: ``REWRITER_CACHE_DIR``, else the user's own."""
    return cache_folder.tuned()


def stamp() -> tuple[object, ...]:
    """Returns what differs after something was measured, here or by others."""
    folders = [path(), *_devices(path())]
    folders += [inner for folder in folders[1:] for inner in _folders(folder)]
    stamps = []
    for folder in folders:
        with contextlib.suppress(OSError):
            stamps.append((folder, os.stat(folder).st_mtime_ns))
    return path(), tuple(stamps), _process().memory


def _devices(root: str) -> list[str]:
    """The folders of devices: all but that of lowered kernels."""
    lowered = cache_folder.lowered()
    return [folder for folder in _folders(root) if folder != lowered]


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return sorted(f.path for f in found if f.is_dir())
    except OSError:
        return []


def entries(device: str, op: str) -> tuple[Entry, ...]:
    """Returns everything measured for an op on a device kind.

    A folder is read again only if a file in it was added, replaced or removed, or if
    that may just have happened.
    """
    folder = os.path.join(path(), _slug(device), _slug(op))
    process = _process()
    mine = tuple(
        (k, m) for k, m in process.memory.entries if (k.device, k.op) == (device, op)
    )
    try:
        stamp = os.stat(folder).st_mtime_ns
    except OSError:
        return mine
    known = process.read.get(folder)
    if known is None or known[0] != stamp:
        found, problems = _read(_files(folder))
        for name, why in problems:
            _warn(f"{name} is ignored: {why}. {REMEDY}", name)
        known = stamp, found.entries
        if time.time_ns() - stamp > SETTLED_NS:
            process.read[folder] = known
    return (Tuned(known[1]) | Tuned(mine)).entries


def add(key: Key, measurements: Iterable[Measurement]) -> None:
    """Writes measurements, merged with what the files hold already."""
    process = _process()
    by_kernel: dict[str, list[Measurement]] = {}
    for m in measurements:
        by_kernel.setdefault(m.version.replace(", ", "+"), []).append(m)
    for kernel, new in by_kernel.items():
        try:
            _add(_file(key, kernel, new[0].jax), key, new)
        except OSError as problem:
            process.keep((key, tuple(new)))
            text = f"tuned choices stay in memory: {problem}"
            remedy = f"Set {cache_folder.VARIABLE} to a folder that can be written"
            _warn(f"{text}. {remedy}", "unwritable")


def info() -> Info:
    """Returns the place, size and content of the cache."""
    root = path()
    names = list(_walk(root))
    found, problems = _read(names)
    counts: dict[tuple[str, str], int] = {}
    for key, _ in found.entries:
        counts[key.device, key.op] = counts.get((key.device, key.op), 0) + 1
    size = sum(map(_size, names))
    return Info(root, len(names), size, tuple(sorted(counts.items())), problems)


def clear(op: str | None = None, device: str | None = None) -> int:
    """Removes cached files; returns their number.

    Args:
        op: Only of this op.
        device: Only of this device kind.
    """
    process = _process()
    with process.lock:
        process.memory = Tuned(tuple(
            (k, m) for k, m in process.memory.entries
            if (op or k.op, device or k.device) != (k.op, k.device)
        ))  # fmt: skip
    removed = 0
    for name in list(_walk(path())):
        parts = os.path.relpath(name, path()).split(os.sep)
        wanted = (_slug(device) if device else parts[0], _slug(op) if op else parts[1])
        if (parts[0], parts[1]) == wanted:
            with contextlib.suppress(OSError):  # removed, or a folder of the user's
                os.unlink(name)
                removed += 1
    return removed


# ---------------------------------------------------------------------- files
def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", text)


def _file(key: Key, kernel: str, version: str) -> str:
    text = json.dumps([key_json(key), kernel, version], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"{_slug(kernel)}-{digest}.json"
    return os.path.join(path(), _slug(key.device), _slug(key.op), name)


def _files(folder: str) -> list[str]:
    try:
        names = sorted(n for n in os.listdir(folder) if n.endswith(".json"))
    except OSError:  # gone, no folder, or not ours to read
        return []
    return [os.path.join(folder, n) for n in names]


def _size(name: str) -> int:
    try:
        return os.lstat(name).st_size
    except OSError:
        return 0


def _walk(root: str) -> Iterator[str]:
    """Files of the form ``device/op/name.json``; other files are not the cache's."""
    for device in _devices(root):
        for op in _folders(device):
            yield from _files(op)


def _read(names: Sequence[str]) -> tuple[Tuned, tuple[tuple[str, str], ...]]:
    merged: dict[Key, tuple[Measurement, ...]] = {}
    problems: list[tuple[str, str]] = []
    for name in names:
        found = _load(name)
        for key, measurements in found.entries:
            merged[key] = merge(merged.get(key, ()), measurements)
        if found.problems:
            problems.append((name, found.problems_text))
    return Tuned(tuple(merged.items())), tuple(problems)


def _load(name: str) -> Found:
    """The content of a file; nothing if another process removed it."""
    try:
        return read_one(regular_files.read_text(name))
    except (OSError, ValueError) as problem:
        gone = isinstance(problem, FileNotFoundError) and not os.path.lexists(name)
        return Found((), () if gone else (f"{type(problem).__name__}: {problem}",))


def _add(name: str, key: Key, measurements: Sequence[Measurement]) -> None:
    folder = os.path.dirname(name)
    os.makedirs(folder, exist_ok=True)
    with only_writer(folder) as alone:
        _merge_into(name, key, measurements)
        for _ in range(0 if alone else LOOKS):  # others may have read before this
            time.sleep(random.uniform(0.5, 1.5) * LOOK_S)
            if not set(measurements) <= set(dict(_load(name).entries).get(key, ())):
                _merge_into(name, key, measurements)


def _merge_into(name: str, key: Key, measurements: Sequence[Measurement]) -> None:
    found = _load(name)
    if found.problems:
        os.replace(name, f"{name}.damaged")
        _warn(f"{name} is kept as {name}.damaged: {found.problems_text}", name)
    old = dict(found.entries).get(key, ())
    data = {"format": FORMAT, **entry_json((key, merge(old, measurements)))}
    atomic.write(name, json.dumps(data, indent=1).encode())


def _warn(text: str, once: str) -> None:
    if _process().is_new(once):
        warnings.warn(text, CacheWarning, stacklevel=3)
