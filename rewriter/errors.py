"""Exceptions and warnings: what was received, what was expected, what to do next."""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
from collections.abc import Iterable
from types import FrameType, TracebackType


class RewriterError(Exception):
    """Base of every error that this package raises.

    The message is one line: ``where: got; expected wanted. next_step``.

    Attributes:
        got: What was found.
        wanted: What was expected instead, or ``""``.
        next_step: What to do about it, or ``""``.
        where: The user's source line, such as ``"train.py:12"``, or ``""``.

    Example:
        >>> print(RewriterError("1 site", wanted="2", next_step="Look again"))
        1 site; expected 2. Look again.
    """

    def __init__(
        self, got: str, *, wanted: str = "", next_step: str = "", where: str = ""
    ) -> None:
        self.got, self.wanted = got, wanted
        self.next_step, self.where = next_step, where
        super().__init__(sentence(got, wanted, next_step, where))


class TraceError(RewriterError):
    """The user's function could not be traced; the cause is chained."""


class NotTraceable(RewriterError, TypeError):
    """``jax.jit`` does not take what was given; it raises a TypeError there too."""


class UnknownPattern(RewriterError):
    """No pattern or set of patterns has this name."""


class UnknownKernel(RewriterError):
    """No kernel of this op has this name."""


class DuplicateName(RewriterError):
    """Two definitions claim one name."""


class PatternError(RewriterError):
    """A pattern's reference, dims and parameters disagree."""


class KernelError(RewriterError):
    """A kernel returned the wrong shape, dtype or structure."""


class StateLost(RewriterError):
    """A function changes an argument in place where the change cannot be kept."""


class ConfigError(RewriterError):
    """An option does not exist, or its value does not."""


class UnknownOption(ConfigError, TypeError):
    """No option has this name, nor has one of ``jax.jit``; a TypeError there too."""


class RequirementNotMet(RewriterError):
    """Fewer sites were found, or replaced, than ``require=`` asks for."""


class VerificationFailed(RewriterError):
    """A site's numbers differ from its reference by more than allowed."""


class BundleMismatch(RewriterError):
    """Tuned choices were made for another device or version."""


class ExportError(RewriterError):
    """A program cannot be exported, or its file cannot be loaded."""


class DeviceMismatch(ExportError):
    """An artifact was built for another platform or device."""


class RewriterWarning(UserWarning):
    """Something was left as written; the text says what and why."""


class CacheWarning(RewriterWarning):
    """Tuned choices were not found, read or kept as asked; the text says which."""


def sentence(got: str, wanted: str = "", next_step: str = "", where: str = "") -> str:
    """Returns ``where: got; expected wanted. next_step.`` without empty parts."""
    text = f"{where}: {got}" if where else got
    if wanted:
        text = f"{text.rstrip('.')}; expected {wanted}"
    if next_step:
        text = f"{text.rstrip('.')}. {next_step}"
    return text if text.endswith((".", ")", "`")) or not next_step else f"{text}."


def known(name: str, names: Iterable[str]) -> str:
    """Returns a suggestion and the known names, ready for ``next_step``.

    Example:
        >>> known("atention", ["attention", "rms_norm"])
        "Did you mean 'attention'? Known: attention, rms_norm"
    """
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}"


def caller() -> str:
    """Returns the nearest ``file.py:line`` on the stack that the user wrote."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return line_of_file(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def raised_at(error: BaseException) -> str:
    """Returns the deepest ``file.py:line`` of a traceback that the user wrote."""
    found, tb = "", error.__traceback__
    while tb is not None:
        found = _line_of(tb) or found
        tb = tb.tb_next
    return found


def is_users_own(filename: str) -> bool:
    """Returns whether a file is the user's: no installed package, and not ours.

    Example:
        >>> is_users_own("train.py"), is_users_own(__file__)
        (True, False)
    """
    return _is_users(filename) and not any(p in filename for p in _PACKAGES)


def line_of_file(filename: str, line: int) -> str:
    """Returns a line as reports and errors name it: that of a notebook has its cell.

    Example:
        >>> line_of_file("/home/me/train.py", 12)
        'train.py:12'
    """
    name = filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{_cell(filename) or name}:{line}"


def _line_of(tb: TracebackType) -> str:
    name = tb.tb_frame.f_code.co_filename
    return line_of_file(name, tb.tb_lineno) if _is_users(name) else ""


def _cell(filename: str) -> str:
    """What IPython calls the cell that a file holds: ``In[4]``; ``""`` without one."""
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    return ((name and name(filename)) or ("", ""))[1]


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_ENGINES = tuple(
    os.sep + os.path.join(folder, name) + os.sep
    for folder in _PACKAGES
    for name in ("jax", "jaxlib", "opt_einsum", "rewriter")
)


def _is_users(filename: str) -> bool:
    if filename.startswith(_OURS) or any(e in filename for e in _ENGINES):
        return False
    if filename.startswith("<") and not filename.startswith("<stdin"):
        return False
    in_packages = any(p in filename for p in _PACKAGES)
    return in_packages or not filename.startswith(_LIBRARY)
