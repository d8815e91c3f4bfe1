"""A set of measurements as one value: to keep, merge, share and apply."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import jax

from rewriter.config import enter, leave
from rewriter.errors import BundleMismatch, CacheWarning, caller
from rewriter.measure.decision import by_time, fastest, why_not, within_kernel
from rewriter.measure.key import Key, nearest
from rewriter.measure.measurement import (
    BUNDLES,
    ESTIMATES,
    Entry,
    Measurement,
    by_inputs_text,
    merge,
    of_spelling,
    spellings,
    time_text,
)
from rewriter.measure.serialized import FORMAT, entry_json, read_all, wrong_entry
from rewriter.site.implementation import XLA
from rewriter.support import atomic, regular_files

MOST_BYTES = 1 << 30
"""The largest file of many keys; a thousand of them have some 10 MB."""


@dataclass(frozen=True)
class Tuned:
    """Measurements of any number of sites; immutable, hashable, readable as JSON.

    In a ``with`` block every function traced inside uses them; leaving it finds the
    earlier programs again.

    Attributes:
        entries: (key, measurements) pairs.

    Example:
        >>> tuned = Tuned()
        >>> Tuned.loads(tuned.dumps()) == tuned
        True
    """

    entries: tuple[Entry, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    @functools.cached_property
    def _by_key(self) -> dict[Key, tuple[Measurement, ...]]:
        return dict(self.entries)

    def find(self, key: Key) -> tuple[Measurement, ...]:
        """Returns the measurements of exactly this key."""
        return self._by_key.get(key, ())

    def nearest(self, key: Key) -> tuple[Measurement, ...]:
        """Returns those of the nearest shapes, all else being equal, if any is near."""
        return nearest(self.entries, key)

    def __or__(self, other: Tuned) -> Tuned:
        """Returns both; where both measured an implementation, the right one's."""
        if not isinstance(other, Tuned):
            return NotImplemented
        merged = dict(self.entries)
        for key, found in other.entries:
            merged[key] = merge(merged.get(key, ()), found)
        return Tuned(tuple(merged.items()))

    def __len__(self) -> int:
        return len(self.entries)

    def __enter__(self) -> Tuned:
        enter(self.check("this Tuned"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace
        leave()

    # ------------------------------------------------------------------ files
    def dumps(self) -> str:
        """Returns everything as JSON text."""
        data = {"format": FORMAT, "entries": [entry_json(e) for e in self.entries]}
        return json.dumps(data, indent=1)

    @classmethod
    def loads(cls, text: str, source: str = "the text") -> Tuned:
        """Returns what `dumps` wrote.

        Raises:
            BundleMismatch: If the text is something else, or a record in it is wrong.
        """
        found = read_all(text)
        if found.problems:
            raise _no_tuned(f"{source} holds no tuned choices: {found.problems_text}")
        return cls(found.entries)

    def check(self, source: str) -> Tuned:
        """Returns this, if every record is as it should be; one that is read is.

        Args:
            source: What to call it.

        Raises:
            BundleMismatch: If a record is wrong.
        """
        if self._wrong:
            raise _no_tuned(f"{source} holds no tuned choices: {self._wrong}")
        return self

    @functools.cached_property
    def _wrong(self) -> str:
        wrong = (wrong_entry(e, f"entries[{i}]") for i, e in enumerate(self.entries))
        return next(filter(None, wrong), "")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `dumps` to a file, whole or not at all."""
        atomic.write(os.fspath(path), self.dumps().encode())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], strict: bool = False, source: str = ""
    ) -> Tuned:
        """Returns what `save` wrote.

        Args:
            path: The file.
            strict: Fail, and not only warn, if it was made on another device kind or
                with another JAX than this process has.
            source: What an error calls the file; its path by default.

        Raises:
            BundleMismatch: If the file holds something else, or as `strict` says.
            FileNotFoundError: If there is no such file.
        """
        name = source or os.fspath(path)
        try:
            text = regular_files.read_text(os.fspath(path), MOST_BYTES)
        except ValueError as problem:
            raise _no_tuned(f"{name} holds no tuned choices: {problem}") from problem
        tuned = cls.loads(text, name)
        if problem := _mismatch(tuned):
            if strict:
                raise BundleMismatch(
                    f"{name}: {problem}",
                    next_step="Tune again here, or load it with strict=False",
                    where=caller(),
                )
            warnings.warn(f"{name}: {problem}", CacheWarning, stacklevel=2)
        return tuned

    # ------------------------------------------------------------------ words
    def table(self) -> str:
        """Returns every candidate of every site: time, spread, memory, why it lost."""
        lines: list[str] = []
        for key, measurements in self.entries:
            for spelling in spellings(measurements) or ("",):
                found = of_spelling(measurements, spelling)
                lines += [key.text, *_rows(found), ""]
        return "\n".join(lines[:-1]) if lines else "nothing was measured"

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Tuned({len(self.entries)} sites and passes)"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(self.table())}</pre>"


def _no_tuned(text: str) -> BundleMismatch:
    step = "Make them with rewriter.tune(fn)(*args).save(path)"
    return BundleMismatch(text, next_step=step, where=caller())


def _rows(measurements: Sequence[Measurement]) -> Iterator[str]:
    if not measurements:
        yield "  nothing could be timed"
        return
    decision = fastest(measurements)
    width = max(len(_name(m)) for m in measurements)
    for m in sorted(measurements, key=by_time):
        name = f"  {_name(m):<{width}}"
        if m.median_us is None:
            yield f"{name}  ✗ {m.problem}"
            continue
        memory = "" if m.temp_bytes is None else f"  {m.temp_bytes / 2**20:8.1f} MiB"
        spread = f"±{m.sigma_us / m.median_us:.1%}"
        times = f"{time_text(m.median_us):>8} "
        times += m.method if m.method in ESTIMATES else spread
        if decision is None or decision.best.method == BUNDLES:
            why = within_kernel(m, measurements)
        else:
            best = decision.best
            why = "✓ chosen" if m is best else why_not(m, best)
        yield f"{name}  {times}{memory}  {why}"
        for more in filter(None, (by_inputs_text(m.by_inputs), m.note)):
            yield f"  {'':<{width}}  {more}"


def _name(m: Measurement) -> str:
    """The implementation in words; of XLA, what it was given."""
    if m.version.split()[0] != XLA:
        return m.implementation.text
    own = m.spelling and not m.note
    return f"{XLA} (as written: {m.spelling})" if own else f"{XLA} (as usually written)"


def _mismatch(tuned: Tuned) -> str:
    kinds = {k.device for k, _ in tuned.entries}
    here = str(jax.devices()[0].device_kind)
    if kinds and here not in kinds:
        return f"tuned for {', '.join(sorted(kinds))}, this is {here}"
    versions = {m.jax for _, ms in tuned.entries for m in ms}
    if versions and jax.__version__ not in versions:
        return f"tuned with jax {', '.join(sorted(versions))}, not {jax.__version__}"
    return ""
