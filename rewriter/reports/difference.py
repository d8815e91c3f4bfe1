"""The difference of two reports: what was gained, lost or chosen otherwise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]
"""A site or near miss of a report, as plain data."""

COMPARED = (
    "kernel", "replaced", "repeats", "shapes", "backward", "form", "sharding",
)  # fmt: skip
"""Fields of a site that are compared beside its parameters; reasons come apart."""


@dataclass(frozen=True)
class Changed:
    """A site of both reports that is not the same in them.

    Attributes:
        op: The op's name.
        where: The user's line, in the later report.
        fields: (field of `Site` or parameter, value before, value after) for those
            that differ.
        reasons: (reasons before, reasons after) against other kernels, where they
            differ; else None.
    """

    op: str
    where: str
    fields: tuple[tuple[str, Any, Any], ...]
    reasons: tuple[tuple[str, ...], tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Listed:
    """A site or near miss of one report alone.

    Attributes:
        op: The op's name.
        where: The user's line.
        repeats: How often it runs.
        text: A site's kernel, or a near miss' reasons.
    """

    op: str
    where: str
    repeats: int
    text: str


@dataclass(frozen=True)
class Count:
    """Numbers of found and replaced sites of an op, before and after."""

    op: str
    found: tuple[int, int]
    replaced: tuple[int, int]


@dataclass(frozen=True)
class Difference:
    """The differences of two reports. It is false if there are none.

    Sites are the same if op, file and function are: lines may move. Where several are,
    those of one line are paired first, and the others in the order of the program.
    Times of the analysis are not compared.

    Attributes:
        names: The functions' names, before and after.
        counts: Ops whose counts differ.
        gained: Sites of the later report alone.
        lost: Sites of the earlier report alone.
        changed: Sites of both that differ.
        misses_gained: Near misses of the later report alone.
        misses_lost: Near misses of the earlier report alone.
        failures: What went wrong inside the rewriter in the later report alone.
    """

    names: tuple[str, str]
    counts: tuple[Count, ...] = ()
    gained: tuple[Listed, ...] = ()
    lost: tuple[Listed, ...] = ()
    changed: tuple[Changed, ...] = ()
    misses_gained: tuple[Listed, ...] = ()
    misses_lost: tuple[Listed, ...] = ()
    failures: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        lists = (
            self.counts, self.gained, self.lost, self.changed,
            self.misses_gained, self.misses_lost, self.failures,
        )  # fmt: skip
        return any(lists)

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Returns the difference as text."""
        return "\n".join(_lines(self))

    def as_dict(self) -> dict[str, Any]:
        """Returns the difference as plain dicts and lists."""
        return asdict(self)

    def json(self) -> str:
        """Returns the difference as JSON."""
        return json.dumps(self.as_dict(), indent=1, default=str)


def difference(before: Row, after: Row) -> Difference:
    """Returns the difference of two reports.

    Args:
        before: The earlier report's ``as_dict()``, or that read from its JSON.
        after: The later report's.
    """
    pairs, lost, gained = _paired(before["sites"], after["sites"])
    changed = (_changed(a, b) for a, b in pairs)
    same, misses_lost, misses_gained = _paired(before["misses"], after["misses"])
    for a, b in same:
        if _reasons(a) != _reasons(b):
            misses_lost, misses_gained = [*misses_lost, a], [*misses_gained, b]
    return Difference(
        (before["function"], after["function"]),
        tuple(_counts(before, after)),
        tuple(_listed(row, row["kernel"]) for row in gained),
        tuple(_listed(row, row["kernel"]) for row in lost),
        tuple(c for c in changed if c is not None),
        tuple(_listed(row, "; ".join(_reasons(row))) for row in misses_gained),
        tuple(_listed(row, "; ".join(_reasons(row))) for row in misses_lost),
        tuple(f["text"] for f in after["failures"] if f not in before["failures"]),
    )


def _paired(
    before: Sequence[Row], after: Sequence[Row]
) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """Rows of both, of the first alone, of the second alone; each in its order."""
    groups: dict[Any, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for k, rows in enumerate((before, after)):
        for row in rows:
            key = (row["op"], *map(_function, _lines_of(row)), row.get("scope"))
            groups[key][k].append(row)
    pairs: list[tuple[Row, Row]] = []
    lost, gained = [], []
    for mine, theirs in groups.values():
        left = []
        for row in mine:
            twin = next((t for t in theirs if _lines_of(t) == _lines_of(row)), None)
            if twin is None:
                left.append(row)
            else:
                theirs.remove(twin)
                pairs.append((row, twin))
        pairs += zip(left, theirs, strict=False)
        lost += left[len(theirs) :]
        gained += theirs[len(left) :]
    return pairs, lost, gained


def _lines_of(row: Row) -> tuple[str, str]:
    return row["where"], row.get("called_from", "")


def _function(where: str) -> tuple[str, str]:
    """File and function of a line such as ``"model.py:88 (Block.__call__)"``."""
    place, _, function = where.partition(" ")
    return place.rpartition(":")[0], function


def _changed(before: Row, after: Row) -> Changed | None:
    old, new = ({**row, **row["params"]} for row in (before, after))
    names = dict.fromkeys((*COMPARED, *before["params"], *after["params"]))
    fields = tuple(
        (name, old.get(name), new.get(name))
        for name in names
        if old.get(name) != new.get(name)
    )
    reasons = _reasons(before), _reasons(after)
    differ = reasons[0] != reasons[1]
    if not fields and not differ:
        return None
    return Changed(after["op"], after["where"], fields, reasons if differ else None)


def _reasons(row: Row) -> tuple[str, ...]:
    """Why a site has no other kernel, or why a near miss is none."""
    if "not_chosen" in row:
        return tuple(f"{kernel}: {why}" for kernel, why in row["not_chosen"])
    return tuple(reason["text"] for reason in row["reasons"])


def _listed(row: Row, text: str) -> Listed:
    return Listed(row["op"], row["where"], row.get("repeats", 1), text)


def _counts(before: Row, after: Row) -> Iterator[Count]:
    sides = before, after
    for op in dict.fromkeys((*before["counts"], *after["counts"])):
        found, replaced = (
            (sides[0].get(k, {}).get(op, 0), sides[1].get(k, {}).get(op, 0))
            for k in ("counts", "replaced")
        )
        if found[0] != found[1] or replaced[0] != replaced[1]:
            yield Count(op, found, replaced)


# ------------------------------------------------------------------- text
def _lines(d: Difference) -> Iterator[str]:
    names = " → ".join(dict.fromkeys(d.names))
    if not d:
        yield f"{names}: both reports say the same"
        return
    yield f"{names}: {_summary(d)}"
    for c in d.counts:
        kinds = (("found", c.found), ("replaced", c.replaced))
        texts = [f"{a} → {b} {kind}" for kind, (a, b) in kinds if a != b]
        yield f"   {c.op}: {', '.join(texts)}"
    for mark, word, rows in (("+", "site", d.gained), ("-", "site", d.lost),
                             ("+", "near miss", d.misses_gained),
                             ("-", "near miss", d.misses_lost)):  # fmt: skip
        for r in rows:
            yield f" {mark} {word}: {r.op} ×{r.repeats}  {r.where}  {r.text}"
    yield from (f" + failure: {text}" for text in d.failures)
    for s in d.changed:
        yield f" ~ site: {s.op}  {s.where}"
        for name, old, new in s.fields:
            yield f"     {name}: {old} → {new}"
        for mark, texts, others in _changed_reasons(s):
            yield from (f"     {mark} {t}" for t in texts if t not in others)


def _changed_reasons(
    s: Changed,
) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    if s.reasons is not None:
        old, new = s.reasons
        yield "- reason", old, new
        yield "+ reason", new, old


def _summary(d: Difference) -> str:
    parts = (
        (d.gained, "gained"), (d.lost, "lost"), (d.changed, "changed"),
        (d.misses_gained, "near miss{es} gained"),
        (d.misses_lost, "near miss{es} lost"),
        (d.failures, "failure{s}"),
    )  # fmt: skip

    def counted(rows: Sequence[Any], word: str) -> str:
        plural = len(rows) != 1
        return f"{len(rows)} {word.format(es='es' * plural, s='s' * plural)}"

    return ", ".join(counted(rows, word) for rows, word in parts if rows)
