"""Remembers regions that were proved, and places where no pattern matched."""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.template import Step as Way
from rewriter.algebra.template import Template, go
from rewriter.find.nested import Escapes, is_read_elsewhere
from rewriter.program.graph import Graph, Node


@dataclass(frozen=True, eq=False)
class Proved:
    """Proofs made at one anchor.

    Attributes:
        templates: The matches.
        inside: The ways to results inside of them, and whether each is read elsewhere.
    """

    templates: tuple[Template, ...]
    inside: tuple[tuple[tuple[Way, ...], bool], ...]

    def is_like(
        self, graph: Graph, anchor: Node, inner: Set[int], out: Escapes
    ) -> bool:
        """Whether the same results inside are read elsewhere at another anchor."""
        for path, elsewhere in self.inside:
            value = go(graph, anchor.outs, path)
            if value is None:
                return False
            if is_read_elsewhere(graph, value, inner, out) != elsewhere:
                return False
        return True


class SearchCache:
    """Proved regions, the values inside them, and anchors where nothing matched."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.proved: dict[str, list[Proved]] = {}
        self.covered: dict[str, set[int]] = {}
        self.nothing: set[tuple[str, Node]] = set()

    @functools.cached_property
    def out(self) -> Escapes:
        """Where results of bodies go; found when a region inside another is."""
        return Escapes(self.graph)

    def is_empty(self, pattern: Any, anchor: Node) -> bool:
        """Whether regions equal to that of an anchor hold no site of a pattern."""
        return not pattern.looks_above and (pattern.name, anchor) in self.nothing
