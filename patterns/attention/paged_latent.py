"""Paged latent attention: latent attention whose cache is pages that a table names.

Formula    latent[b, p z + o, w] = latent_pages[table[b, p], o, w], and rotary keys
           alike; then latent attention over them
Looks like latent attention, with a gather of pages above its contractions.
Must hold  the cache is whole pages of one pool, or of two with the same table. Nothing
           else is done to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rewriter.algebra.canonicalize import Pages
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Group, Operand, Reading, Refused, operand
from rewriter.patterns.attention import read
from rewriter.patterns.attention.latent import latent
from rewriter.patterns.attention.paged import (
    looking_through,
    pool_without_heads,
    reads_pages,
    takes_pages,
)
from rewriter.patterns.attention.read import ANCHORS, STEPS
from rewriter.program.graph import Node

NAME = "paged_latent_attention"


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of latent attention over pages around an exponential."""
    looking = looking_through(find, NAME, _of_pages)
    if looking is None or not reads_pages(looking, anchor):
        return
    for reading in read.propose(looking, anchor):
        try:
            yield paged(looking, latent(looking, reading))
        except Refused as refusal:
            find.missed(NAME, anchor, refusal)
            looking.found[reading.op, reading.value] = reading
        except OverBudget as error:
            find.missed(NAME, anchor, Refused("budget", str(error), score=0.3))
        if find.done(NAME, reading.value):
            looking.found[reading.op, reading.value] = reading


def _of_pages(find: Finder, node: Node) -> bool:
    """Whether a gather takes pages of an array without heads, or with one."""
    taken, shape = node.params["slice_sizes"], find.graph.shape(node.ins[0])
    heads = [n for n in shape[1:-1] if n == 1]
    plain = len(taken) - len(heads) == 3 and len(shape) == len(taken)
    return plain and takes_pages(find, node)


def paged(find: Finder, reading: Reading) -> Reading:
    """Turns a reading of latent attention into one over pages.

    Raises:
        Refused: If the cache is not pages that one table names.
    """
    alg = find.algebra
    if reading.proof is not None:
        text = "pages of two pools are joined to keys"
        raise Refused("pages", text, score=0.5)
    own, tables = {}, []
    for name in ("latent", "k_rope"):
        if name in reading.operands:
            source, rows, page = _gathered(find, reading.operands[name])
            tables.append((source[1:], rows, page))
            own[f"{name}_pages"] = pool_without_heads(find, source.array)
    if len(set(tables)) > 1:
        text = "latents and rotary keys are gathered by different tables"
        raise Refused("table", text, score=0.5)
    numbers = alg.of_atom(alg.atom("leaf", source.table, rows))
    own["table"] = operand(numbers, reading.out_groups[0], page)
    rest = {n: o for n, o in reading.operands.items() if n not in ("latent", "k_rope")}
    of_pages = {n: getattr(source, n) for n in ("wraps", "fills", "promises")}
    params = {**reading.params, **of_pages}
    return dataclasses.replace(
        reading, op=NAME, operands={**rest, **own}, params=params
    )


def _gathered(find: Finder, cache: Operand) -> tuple[Pages, tuple[Index, ...], Group]:
    """Reads a cache as pages: the pool and table, the table's indices, the page's.

    Raises:
        Refused: If it is not whole pages.
    """
    alg, ((form, (_, s, width)),) = find.algebra, cache.parts
    atoms = [a for (_, mono) in form for a, _ in mono]
    name = alg.defs[atoms[0]][1] if len(atoms) == 1 else None
    if not isinstance(name, Pages):
        raise Refused("pages", "the cache is not gathered pages", score=0.2)
    shape, args = find.graph.shape(name.array), alg.defs[atoms[0]][2]
    inside, rows = args[: len(shape) - 1], args[len(shape) - 1 :]
    positions = [a for a in inside[:-1] if a is not None]
    if name.axis or s[-1:] != tuple(positions) or inside[-1:] != tuple(width):
        text = "pages have other axes than positions and columns"
        raise Refused("pages", text, score=0.5)
    if find.algebra.sizes[width[0]] != shape[-1]:
        text = "some columns of the pages are not used"
        raise Refused("pages", text, score=0.5)
    return name, rows, s[:-1]


PATTERN = ReaderPattern(
    NAME, ANCHORS, propose, STEPS, frozenset({"gather"}), looks_above=True
)
