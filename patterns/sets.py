"""Named sets of patterns, and which patterns a configuration enables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter.ops.registry import registry
from rewriter.patterns.index import PATTERNS


def in_force(names: str, extra: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Returns the patterns for a comma-separated list of names.

    ``default`` is the default set, ``none`` the empty one, ``-name`` removes, and only
    removals imply ``default``. Removing an op also removes its special forms and
    composites of it.

    Raises:
        UnknownPattern: For an unknown name, with a suggestion.
    """
    words = [w.strip() for w in names.split(",") if w.strip()]
    if all(w.startswith("-") for w in words):
        words = ["default", *words]
    chosen: dict[str, Any] = {}
    for word in words:
        if word.startswith("-"):
            registry().pattern(word[1:])
            chosen.pop(word[1:], None)
            for name, pattern in list(chosen.items()):
                if word[1:] in (pattern.op.form_of, pattern.op.parts):
                    del chosen[name]
        elif word == "default":
            chosen.update(
                (n, registry().pattern(n)) for n in (*PATTERNS, *registry().defaults)
            )
        elif word != "none":
            chosen[word] = registry().pattern(word)
    chosen.update((p.name, p) for p in extra)
    return tuple(chosen.values())
