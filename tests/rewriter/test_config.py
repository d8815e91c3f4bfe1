"""Options: precedence, suggestions, logging."""

from __future__ import annotations

import logging
import threading

import pytest

import rewriter
from rewriter.config import Config, configure_logging, current, resolve
from rewriter.errors import ConfigError, RewriterWarning


def test_precedence():
    assert resolve({}) == Config()
    with rewriter.config(numerics="strict", patterns="none"):
        assert resolve({"patterns": "attention"}).numerics == "strict"
        assert resolve({"patterns": "attention"}).patterns == "attention"
        with rewriter.config(numerics="fast") as inner:
            assert inner == current() == resolve({})
            assert inner.patterns == "none"
        assert current().numerics == "strict"
    assert current() == Config()


def test_a_new_thread_starts_from_defaults():
    seen = []
    with rewriter.config(numerics="strict"):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [Config()]


def test_values_become_hashable():
    found = resolve({"require": {"b": 2, "a": 1}, "implementation": {"x": "y"}})
    assert found.require == (("a", 1), ("b", 2))
    assert found.implementation == (("x", ("y",), ()),)
    hash(found)
    forms = {"a": ["x", "y"], "b": {"forward": "x", "backward": ["y"]}}
    found = resolve({"implementation": forms})
    assert found.implementation == (("a", ("x", "y"), ()), ("b", ("x",), ("y",)))
    assert resolve({"implementation": found.implementation}) == found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"numeric": "fast"}, "unknown option 'numeric'. Did you mean 'numerics'"),
        ({"numerics": "quick"}, "numerics='quick'. Choose strict, default, fast"),
        ({"verify": True}, "Choose off, once"),
        ({"strict": "yes"}, "Choose True, False"),
        ({"require": {"attention": "two"}}, "a dict of op name to count"),
        ({"implementation": "xla"}, "a dict of op name to a kernel's name"),
        ({"implementation": {"attention": 3}}, "implementation['attention']=3"),
        ({"implementation": {"attention": {"back": "xla"}}}, "forward, backward"),
        ({"tuned": 3}, "tuned=3; expected what rewriter.tune gives, or the path"),
        ({"patterns": 3}, "expected a string"),
    ],
)
def test_bad_values(options, text):
    with pytest.raises(ConfigError) as caught, rewriter.config(**options):
        pass
    assert text in str(caught.value)
    assert str(caught.value).startswith("test_config.py:")


def test_logging_by_stage(capsys):
    logger = logging.getLogger("rewriter.match")
    try:
        configure_logging("+match,-choose")
        logger.debug("said")
        logging.getLogger("rewriter.choose").error("silent")
        assert capsys.readouterr().err == "rewriter.match: said\n"
        with pytest.warns(RewriterWarning, match="Did you mean 'match'"):
            configure_logging("mach")
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        other = logging.getLogger("rewriter.choose")
        other.handlers.clear()
        other.setLevel(logging.NOTSET)
