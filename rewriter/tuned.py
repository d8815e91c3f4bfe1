"""Measurements as one value: what was timed where, and which implementation won."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import jax

from rewriter import atomic, config
from rewriter.errors import BundleMismatch, CacheWarning, caller
from rewriter.implementation import XLA, Implementation
from rewriter.kernel import Kernel, Spec

FORMAT = 1
FORWARD, BOTH = "forward", "forward_and_vjp"
"""The passes that are measured: the result alone, or the result and all gradients."""

PROGRAM, WHOLE = "program", "whole"
"""The op and pass under which whole programs are measured."""

REWRITTEN, WITHOUT = "rewritten", "without "
"""Implementations of whole programs: with every site's choice, or without an op's."""

TIE = 0.02
"""A share of the time within which two implementations are as fast."""

FAR = 2.0
"""How far shapes may differ to be near: the sum over axes of |log2 of the ratio|."""

SAVING = 64 << 20
"""Bytes of temporary memory worth a choice at the same speed."""


@dataclass(frozen=True)
class Key:
    """What an implementation was measured on.

    Floating parameters (a scale, an epsilon) only count as present or absent: they do
    not change the time. Everything else does: shapes, dtypes, windows. Leading axes,
    where an operand may have any, are one; a result's dtype that is not given is that
    of the first operand.

    Attributes:
        op: The op's name.
        passes: ``"forward"`` or ``"forward_and_vjp"``.
        shapes: (operand, shape) pairs.
        dtypes: (operand, dtype) pairs.
        params: (name, value) pairs, values as JSON has them.
        device: The device kind.
        precision: `jax.default_matmul_precision`, or ``""``.
    """

    op: str
    passes: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[tuple[str, str], ...]
    params: tuple[tuple[str, Any], ...]
    device: str
    precision: str = ""

    @property
    def text(self) -> str:
        """The key in words."""
        if self.op == PROGRAM:
            return f"whole program {dict(self.params)['digest']}"
        dtypes = dict(self.dtypes)
        operands = " ".join(
            f"{n} {dtypes[n]}[{','.join(map(str, s))}]" for n, s in self.shapes
        )
        return f"{self.op} {self.passes} {operands}"


def key_of(spec: Spec, passes: str, device: str) -> Key:
    """Returns the key of a use of an op; its shapes must be known.

    Example:
        >>> spec = Spec("f", (("x", (2, 3)),), (("x", "float32"),), (("eps", 1e-6),))
        >>> key_of(spec, "forward", "cpu").params
        (('eps', 'float'),)
    """
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    params = tuple(
        (n, spec.dtypes[0][1] if n == "out_dtype" and v is None else _plain(v))
        for n, v in spec.params
    )
    tails = dict(spec.tails)
    shapes = tuple((n, _merged(s, tails.get(n))) for n, s in spec.shapes)
    return Key(spec.op, passes, shapes, spec.dtypes, params, device, precision or "")


def _merged(shape: tuple[Any, ...], tail: int | None) -> tuple[int, ...]:
    if tail is None or len(shape) <= tail:
        return shape
    first = len(shape) - tail
    return (math.prod(shape[:first]), *shape[first:])


def program_key(
    sites: Iterable[tuple[Key, str]], inputs: Iterable[Any], device: str
) -> Key:
    """Returns the key of a whole program: its inputs, and its sites with the choices.

    Args:
        sites: (key, chosen implementation in words) for every site.
        inputs: The program's input types.
        device: The device kind.
    """
    texts = sorted(json.dumps([key_json(k), name]) for k, name in sites)
    whole = json.dumps([texts, [str(i) for i in inputs]])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    params = (("digest", digest),)
    return Key(PROGRAM, WHOLE, (), (), params, device, precision or "")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return "float"
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return str(value)


@dataclass(frozen=True)
class Measurement:
    """One implementation's time, or why it has none.

    Attributes:
        implementation: The kernels and configs.
        version: The kernels' names and versions, such as ``"cudnn 1"``.
        jax: The JAX version.
        median_us: Median device time of a run in microseconds; None if it failed.
        sigma_us: The spread of one run.
        runs: How many were taken.
        method: ``"cupti"`` or ``"wall clock"``.
        temp_bytes: Temporary memory of the compiled program, if known.
        problem: Why there is no time.
    """

    implementation: Implementation
    version: str
    jax: str
    median_us: float | None
    sigma_us: float = 0.0
    runs: int = 0
    method: str = ""
    temp_bytes: int | None = None
    problem: str = ""

    @property
    def error_us(self) -> float:
        """The standard error of the median, in microseconds."""
        return 1.2533 * self.sigma_us / max(1, self.runs) ** 0.5


Entry = tuple[Key, tuple[Measurement, ...]]


def version_of(implementation: Implementation, kernels: Mapping[str, Kernel]) -> str:
    """Returns names and versions of an implementation's kernels, as one word each."""
    names = implementation.kernels
    return ", ".join(f"{n} {kernels[n].version}" for n in names) or XLA


# ------------------------------------------------------------------- deciding
@dataclass(frozen=True)
class Decision:
    """The best of some measurements.

    Attributes:
        best: What won.
        lost: (kernels' names, why) for the others, fastest first.
    """

    best: Measurement
    lost: tuple[tuple[str, str], ...]


def decide(measurements: Sequence[Measurement]) -> Decision | None:
    """Returns the fastest implementation; XLA unless one is clearly better.

    To win over the program as written, an implementation must be faster by more than
    2 % and three standard errors, or save half the temporary memory, and 64 MiB, at
    the same speed. Among equals the one with the least memory wins, then the name.

    Returns:
        None if nothing has a time.
    """
    timed = [m for m in measurements if m.median_us is not None]
    if not timed:
        return None
    fastest = min(timed, key=_time)
    level = [m for m in timed if not _slower(m, fastest)]
    best = min(level, key=lambda m: (_rounded(m.temp_bytes), m.implementation.text))
    written = next((m for m in timed if m.implementation.forward == XLA), None)
    if written is not None and best is not written and not _slower(written, best):
        level = [m for m in timed if not _slower(m, written) and _saves(m, written)]
        best = min(level, key=_time) if level else written
    lost = tuple(
        (m.implementation.name, _why(m, best))
        for m in sorted(measurements, key=_time)
        if m is not best
    )
    return Decision(best, lost)


def _time(m: Measurement) -> float:
    return math.inf if m.median_us is None else m.median_us


def _rounded(size: int | None) -> float:
    """Sizes that differ by little are the same."""
    return math.inf if size is None else round(math.log2(size + SAVING) * 4)


def _slower(m: Measurement, than: Measurement) -> bool:
    """Whether a time is longer by more than 2 % and three standard errors."""
    gap = _time(m) - _time(than)
    return gap > max(TIE * _time(than), 3 * math.hypot(m.error_us, than.error_us))


def _saves(m: Measurement, than: Measurement) -> bool:
    if m.temp_bytes is None or than.temp_bytes is None:
        return False
    saved = than.temp_bytes - m.temp_bytes
    return saved >= SAVING and 2 * m.temp_bytes <= than.temp_bytes


def _why(m: Measurement, best: Measurement) -> str:
    if m.median_us is None:
        return m.problem
    ratio = m.median_us / _time(best)
    times = f"{time_text(m.median_us)} against {time_text(_time(best))}"
    if ratio > 1 + TIE:
        return f"{ratio:.2f} times as long: {times}"
    return f"not faster by more than the noise, {times}, and saves no memory"


def time_text(us: float) -> str:
    """Returns microseconds in words.

    Example:
        >>> time_text(412.13), time_text(5879.0)
        ('412 µs', '5.88 ms')
    """
    return f"{us:.3g} µs" if us < 1000 else f"{us / 1000:.3g} ms"


# ---------------------------------------------------------------------- Tuned
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
        config.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        config.leave(kind, error, trace)

    # ------------------------------------------------------------------ files
    def dumps(self) -> str:
        """Returns everything as JSON text."""
        return json.dumps({"format": FORMAT, "entries": [
            {"key": key_json(k), "measurements": [measurement_json(m) for m in ms]}
            for k, ms in self.entries
        ]}, indent=1)  # fmt: skip

    @classmethod
    def loads(cls, text: str, source: str = "the text") -> Tuned:
        """Returns what `dumps` wrote.

        Raises:
            BundleMismatch: If the text is something else.
        """
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            entries = tuple(
                (key_from(e["key"]), tuple(map(measurement_from, e["measurements"])))
                for e in data["entries"]
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise BundleMismatch(
                f"{source} holds no tuned choices: {problem!r}",
                next_step="Make them with rewriter.tune(fn)(*args).save(path)",
                where=caller(),
            ) from problem
        return cls(entries)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `dumps` to a file, whole or not at all."""
        atomic.write(os.fspath(path), self.dumps().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], strict: bool = False) -> Tuned:
        """Returns what `save` wrote.

        Args:
            path: The file.
            strict: Fail, and not only warn, if it was made on another device kind or
                with another JAX than this process has.

        Raises:
            BundleMismatch: If the file holds something else, or as `strict` says.
            FileNotFoundError: If there is no such file.
        """
        with open(path, encoding="utf-8") as file:
            made = cls.loads(file.read(), os.fspath(path))
        if problem := _mismatch(made):
            if strict:
                raise BundleMismatch(
                    f"{os.fspath(path)}: {problem}",
                    next_step="Tune again here, or load it with strict=False",
                    where=caller(),
                )
            warnings.warn(f"{os.fspath(path)}: {problem}", CacheWarning, stacklevel=2)
        return made

    # ------------------------------------------------------------------ words
    def table(self) -> str:
        """Returns every candidate of every site: time, spread, memory, why it lost."""
        lines: list[str] = []
        for key, measurements in self.entries:
            lines += [key.text, *_rows(measurements), ""]
        return "\n".join(lines[:-1]) if lines else "nothing was measured"

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Tuned({len(self.entries)} sites and passes)"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(self.table())}</pre>"


def _rows(measurements: Sequence[Measurement]) -> Iterator[str]:
    decision = decide(measurements)
    width = max(len(m.implementation.text) for m in measurements)
    for m in sorted(measurements, key=_time):
        name = f"  {m.implementation.text:<{width}}"
        if m.median_us is None:
            yield f"{name}  ✗ {m.problem}"
            continue
        memory = "" if m.temp_bytes is None else f"  {m.temp_bytes / 2**20:8.1f} MiB"
        times = f"{time_text(m.median_us):>8} ±{m.sigma_us / m.median_us:.1%}"
        best = decision.best if decision else m
        why = "✓ chosen" if m is best else _why(m, best)
        yield f"{name}  {times}{memory}  {why}"


def merge(
    old: Iterable[Measurement], new: Iterable[Measurement]
) -> tuple[Measurement, ...]:
    """Returns both; of the same implementation, version and JAX, the new one's."""
    by = {(m.implementation, m.version, m.jax): m for m in old}
    by |= {(m.implementation, m.version, m.jax): m for m in new}
    return tuple(by.values())


def nearest(entries: Iterable[Entry], key: Key) -> tuple[Measurement, ...]:
    """Returns the measurements of the nearest shapes; () if none is near.

    Near are the same op, passes, operands, dtypes, parameters and device, on shapes
    whose axes together differ by a factor of four at most.
    """
    best: tuple[float, tuple[Measurement, ...]] = (FAR, ())
    for other, found in entries:
        distance = _distance(other, key)
        if distance < best[0] or (distance == best[0] and not best[1]):
            best = distance, found
    return best[1]


def _distance(a: Key, b: Key) -> float:
    if _but_shapes(a) != _but_shapes(b):
        return math.inf
    total, seen = 0.0, set()
    for (name, first), (other, second) in zip(a.shapes, b.shapes, strict=True):
        if name != other or len(first) != len(second):
            return math.inf
        for x, y in zip(first, second, strict=True):
            if 0 in (x, y):
                return math.inf
            if x != y and (x, y) not in seen:  # an axis that operands share
                seen.add((x, y))
                total += abs(math.log2(x / y))
    return total


def _but_shapes(key: Key) -> tuple[Any, ...]:
    names = tuple(n for n, _ in key.shapes)
    more = (key.dtypes, key.params, key.device, key.precision)
    return key.op, key.passes, names, *more


def _mismatch(tuned: Tuned) -> str:
    kinds = {k.device for k, _ in tuned.entries}
    here = str(jax.devices()[0].device_kind)
    if kinds and here not in kinds:
        return f"tuned for {', '.join(sorted(kinds))}, this is {here}"
    versions = {m.jax for _, ms in tuned.entries for m in ms}
    if versions and jax.__version__ not in versions:
        return f"tuned with jax {', '.join(sorted(versions))}, not {jax.__version__}"
    return ""


# ----------------------------------------------------------------------- JSON
def key_json(key: Key) -> dict[str, Any]:
    """Returns a key as JSON has it."""
    return {"op": key.op, "pass": key.passes, "shapes": dict(key.shapes),
            "dtypes": dict(key.dtypes), "params": dict(key.params),
            "device": key.device, "precision": key.precision}  # fmt: skip


def key_from(data: Mapping[str, Any]) -> Key:
    """Returns the key of its JSON."""
    return Key(
        data["op"],
        data["pass"],
        tuple((n, tuple(s)) for n, s in data["shapes"].items()),
        tuple(data["dtypes"].items()),
        tuple((n, _frozen(v)) for n, v in data["params"].items()),
        data["device"],
        data.get("precision", ""),
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def measurement_json(m: Measurement) -> dict[str, Any]:
    """Returns a measurement as JSON has it."""
    made = asdict(m)
    made["implementation"] = {
        name: dict(value) if isinstance(value, tuple) else value
        for name, value in asdict(m.implementation).items()
        if value not in (None, "")
    }
    return {k: v for k, v in made.items() if v not in (None, "")}


def measurement_from(data: Mapping[str, Any]) -> Measurement:
    """Returns the measurement of its JSON."""
    given = dict(data)
    parts = dict(given.pop("implementation"))
    for name in ("config", "backward_config"):
        if name in parts:
            parts[name] = tuple((k, _frozen(v)) for k, v in parts[name].items())
    given.setdefault("median_us", None)
    return Measurement(Implementation(**parts), **given)
