"""Says which replacement could not be traced where it stands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rewriter.errors import RewriterError
from rewriter.find.match import Match
from rewriter.rewrite.splice import Splice


class NotPlaced(Exception):
    """A replacement cannot be traced where it stands; the cause is chained.

    Attributes:
        match: What was to be replaced.
    """

    def __init__(self, match: Match, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.match = match


@contextlib.contextmanager
def placing(splice: Splice) -> Iterator[None]:
    """Says of an error which replacement it is about."""
    try:
        yield
    except (NotPlaced, RewriterError):
        raise
    except Exception as error:
        raise NotPlaced(splice.match, error) from error
