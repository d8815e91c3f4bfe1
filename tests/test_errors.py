"""Messages say what was got, what was wanted, what to do, and where."""

from __future__ import annotations

import pickle

import pytest

from rewriter import errors


def test_one_line():
    error = errors.RewriterError(
        "got", wanted="wanted", next_step="Do this", where="a.py:3"
    )
    assert str(error) == "a.py:3: got; expected wanted. Do this."
    assert (error.got, error.where) == ("got", "a.py:3")
    assert str(errors.RewriterError("got")) == "got"


def test_every_class_is_a_rewriter_error():
    names = [
        "TraceError", "UnknownPattern", "UnknownKernel", "DuplicateName",
        "PatternError", "KernelError", "ConfigError", "RequirementNotMet",
        "VerificationFailed", "BundleMismatch", "ExportError", "DeviceMismatch",
    ]  # fmt: skip
    for name in names:
        assert issubclass(getattr(errors, name), errors.RewriterError)
    assert issubclass(errors.RewriterWarning, UserWarning)


def test_suggestions():
    assert errors.known("atention", ["attention"]).startswith("Did you mean 'atten")
    assert errors.known("zzz", ["b", "a"]) == "Known: a, b"


def test_places():
    assert errors.caller().startswith("test_errors.py:")

    def inside():
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        inside()
    assert errors.raised_at(caught.value).startswith("test_errors.py:")


def test_errors_travel_between_processes():
    error = errors.ConfigError("got", wanted="wanted")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
