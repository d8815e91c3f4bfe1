"""Draws two programs as one small SVG: before on the left, after on the right.

A box is a run of equations from one source line, or one site. Boxes stand in
the order of their data: those in one row do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.reports.rows import numbers
from rewriter.rewrite.plan import Site

SITE = "rewriter_site"  # the name of the primitive that stands for an op
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
PLAIN = "#d8d8d8"
BOX, GAP, ROW, BETWEEN = 176, 10, 46, 30  # pixels
SHOWN = 60  # boxes per side; beyond that, sites and their neighbours
INSIDE = ("scan", "while", "cond")


@dataclass
class Box:
    """A run of equations from one source line."""

    label: str
    where: str
    color: str = PLAIN
    ops: list[str] = field(default_factory=list)
    after: set[int] = field(default_factory=set)


def before_after(
    before: ClosedJaxpr | None,
    after: ClosedJaxpr | None,
    sites: Sequence[Site],
    index: int | None = None,
) -> str:
    """Returns one self-contained SVG of a program before and after.

    Args:
        before: The program as written.
        after: The program as rewritten.
        sites: The recognised ops; each op and line has one colour on both sides.
        index: Draw the site of this number and its neighbours only.

    Raises:
        ValueError: No site has this number.
    """
    numbers = sorted({s.index for s in sites})
    if index is not None and index not in numbers:
        known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none: no site"
        raise ValueError(f"site={index}: no site has this number; known: {known}")
    if before is None or after is None:
        return "<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>"
    wanted = [s for s in sites if index is None or s.index == index]
    colors = _colors(wanted)
    both = [_boxes(p, colors) for p in (before, after)]
    _number(both, wanted)
    _color_what_is_gone(*both)
    sides = [_near(boxes, index is not None) for boxes in both]
    drawn, widths, heights = zip(*(_panel(side) for side in sides), strict=True)
    second = widths[0] + BETWEEN
    height, width = max(heights) + 40, second + widths[1]
    titles = "".join(
        f"<text x='{x}' y='18' font-weight='bold'>{t}</text>"
        for x, t in ((GAP, "before"), (second + GAP, "after"))
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' font-family='system-ui' font-size='11'>"
        f"<rect width='{width}' height='{height}' rx='6' fill='#fff'/>{titles}"
        f"<g transform='translate(0,28)'>{drawn[0]}</g>"
        f"<g transform='translate({second},28)'>{drawn[1]}</g></svg>"
    )


def to_dot(program: ClosedJaxpr, sites: Sequence[Site] = ()) -> str:
    """Returns the same boxes as Graphviz text."""
    boxes = _boxes(program, _colors(sites))
    lines = [
        f'  {i} [label="{b.label}", style=filled, fillcolor="{b.color}"];'
        for i, b in enumerate(boxes)
    ]
    lines += [f"  {j} -> {i};" for i, b in enumerate(boxes) for j in sorted(b.after)]
    return "\n".join(["digraph {", *lines, "}"])


def _colors(sites: Sequence[Site]) -> dict[str, tuple[str, str]]:
    """Source line to (colour, op)."""
    lines = dict.fromkeys(s.where for s in sites if s.where)
    ops = {s.where: s.op for s in sites}
    return {w: (COLORS[i % len(COLORS)], ops[w]) for i, w in enumerate(lines)}


def _color(colors: Mapping[str, tuple[str, str]], where: str, site: Any) -> str:
    """The colour of a line; of a site on another line, that of its op's first one."""
    if where in colors or site is None:
        return colors.get(where, (PLAIN, ""))[0]
    return next((c for c, op in colors.values() if op == _op_name(site)), PLAIN)


def _color_what_is_gone(before: Sequence[Box], after: Sequence[Box]) -> None:
    """Gives lines that lost equations the colour of the site beside them."""
    left: dict[str, set[str]] = {}
    for box in after:
        left.setdefault(box.where, set()).update(box.ops)
    pairs = [(i, j) for i, box in enumerate(before) for j in box.after]
    colors = [box.color for box in before]
    for i, j in pairs:
        for one, other in ((i, j), (j, i)):
            box = before[one]
            gone = set(box.ops) - left.get(box.where, set())
            if box.color == PLAIN and gone:
                box.color = colors[other]


def _number(both: Sequence[Sequence[Box]], sites: Sequence[Site]) -> None:
    """Puts the numbers of sites in front of the labels of their boxes."""
    lines: dict[str, list[int]] = {}
    for site in sites:
        lines.setdefault(site.where, []).append(site.index)
        lines.setdefault(f"site {site.op}", []).append(site.index)
    for boxes in both:
        for box in boxes:
            found = lines.get(box.where) or lines.get(box.label)
            if found and (box.where or box.label in lines):
                box.label = f"{box.label} {numbers(found)}"


# ------------------------------------------------------------------- boxes
def _boxes(closed: ClosedJaxpr, colors: Mapping[str, tuple[str, str]]) -> list[Box]:
    boxes: list[Box] = []
    home: dict[Any, int] = {}  # value -> box that makes it
    for eqn, reads, writes, where in _equations(closed.jaxpr, {}, ""):
        name = eqn.primitive.name
        is_site = name.startswith(SITE)
        joined = boxes and boxes[-1].where == where and not is_site
        if not joined or boxes[-1].label.startswith("site "):
            label = f"site {_op_name(eqn)}" if is_site else _short(where)
            boxes.append(
                Box(label, where, _color(colors, where, eqn if is_site else None))
            )
        box, number = boxes[-1], len(boxes) - 1
        box.ops.append(name)
        box.after |= {home[x] for x in reads if x in home} - {number}
        home.update(dict.fromkeys(writes, number))
    return boxes


def _equations(
    jaxpr: Any, same: dict[Any, Any], place: str
) -> Iterator[tuple[Any, list[Any], list[Any], str]]:
    """Every equation, calls and loop bodies entered: reads, writes, line."""

    def value(atom: Any) -> Any:
        return None if _jax.is_literal(atom) else same.get(atom, atom)

    for eqn in jaxpr.eqns:
        where = _jax.source_of(eqn) or place
        bodies = _bodies(eqn)
        if not bodies:
            reads = [value(x) for x in eqn.invars if not _jax.is_literal(x)]
            yield eqn, reads, list(eqn.outvars), where
        for body in bodies:
            inner = body.jaxpr if hasattr(body, "jaxpr") else body
            last = list(zip(inner.invars[::-1], eqn.invars[::-1], strict=False))
            known = {**same, **{v: value(x) for v, x in last}}
            yield from _equations(inner, known, where)
            for out, made in zip(eqn.outvars[::-1], inner.outvars[::-1], strict=False):
                if not _jax.is_literal(made):
                    same[out] = known.get(made, made)


def _bodies(eqn: Any) -> list[Any]:
    name = eqn.primitive.name
    if name.startswith(SITE) or name == "pallas_call":
        return []
    if name == "cond":
        return list(eqn.params["branches"])
    if name == "while":
        return [eqn.params["body_jaxpr"]]
    body = _jax.call_body(eqn)
    is_call = name in _jax.CALLS | _jax.REMAT | _jax.CUSTOM or name in INSIDE
    return [body] if body is not None and is_call else []


def _op_name(eqn: Any) -> str:
    use = eqn.params.get("use")
    return str(use.op.name) if use is not None else eqn.primitive.name


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _inside(box: Box) -> str:
    """The second line of a box: the primitives of its equations."""
    if box.label.startswith("site "):
        return "one kernel"
    return _short(", ".join(dict.fromkeys(box.ops)))


def _near(boxes: list[Box], only: bool) -> list[Box]:
    """All boxes if they are few, else the coloured ones and their neighbours."""
    if len(boxes) <= SHOWN and not only:
        return boxes
    chosen = {i for i, b in enumerate(boxes) if b.color != PLAIN}
    near = chosen | {j for i in chosen for j in boxes[i].after}
    near |= {i for i, b in enumerate(boxes) if b.after & chosen}
    kept = sorted(near)[:SHOWN]
    number = {old: new for new, old in enumerate(kept)}
    return [
        Box(boxes[i].label, boxes[i].where, boxes[i].color, boxes[i].ops,
            {number[j] for j in boxes[i].after if j in number})
        for i in kept
    ]  # fmt: skip


# ----------------------------------------------------------------- drawing
def _panel(boxes: Sequence[Box]) -> tuple[str, int, int]:
    """One program: its drawing, and the width and height of it."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(boxes)))
    graph.add_edges_from((j, i) for i, b in enumerate(boxes) for j in b.after)
    at: dict[int, tuple[int, int]] = {}
    y, columns = 0, 1
    for row in nx.topological_generations(graph):
        for k, i in enumerate(sorted(row)):
            at[i] = (GAP + (k % 2) * (BOX + GAP), y + (k // 2) * ROW)
        columns = max(columns, min(len(row), 2))
        y += ROW * ((len(row) + 1) // 2)
    edges = "".join(_edge(at[j], at[i]) for j, i in graph.edges)
    drawn = edges + "".join(_box(b, *at[i]) for i, b in enumerate(boxes))
    return drawn, GAP + columns * (BOX + GAP), y


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1, x2, y2 = start[0] + BOX // 2, start[1] + 32, end[0] + BOX // 2, end[1]
    middle = (y1 + y2) // 2
    return (
        f"<path d='M{x1},{y1}C{x1},{middle} {x2},{middle} {x2},{y2}' "
        "fill='none' stroke='#999'/>"
    )


def _box(box: Box, x: int, y: int) -> str:
    counts = ", ".join(f"{n}×{box.ops.count(n)}" for n in dict.fromkeys(box.ops))
    dark = box.color != PLAIN
    ink = "#fff" if dark else "#222"
    title = f"<title>{escape(box.where)}\n{escape(counts)}</title>"
    return (
        f"<g>{title}<rect x='{x}' y='{y}' width='{BOX}' height='32' rx='4' "
        f"fill='{box.color}'/><text x='{x + 6}' y='{y + 14}' fill='{ink}'>"
        f"{escape(box.label)}</text><text x='{x + 6}' y='{y + 26}' fill='{ink}' "
        f"opacity='.7'>{escape(_inside(box))}</text></g>"
    )
