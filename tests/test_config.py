"""Options: precedence, suggestions, logging."""

from __future__ import annotations

import asyncio
import logging
import threading

import jax.numpy as jnp
import pytest

import rewriter
from rewriter.config import Config, configure_logging, current, resolve
from rewriter.errors import ConfigError, RewriterWarning
from rewriter.measure.tuned import Tuned
from tests.measure.test_tuned import key


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
    assert [(r.op, r.replaced) for r in found.require] == [("a", 1), ("b", 2)]
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
        ({"require": {"attention": "two"}}, "or a dict of op name to a count"),
        ({"implementation": "xla"}, "a dict of op name to a kernel's name"),
        ({"implementation": {"attention": 3}}, "implementation['attention']=3"),
        ({"implementation": {"attention": {"back": "xla"}}}, "forward, backward"),
        ({"tuned": 3}, "tuned=3; expected a result of rewriter.tune, or the path"),
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


VALUES = ("strict", "default", "fast")


def in_turns(one) -> list:
    """What eight tasks say that take turns, each under a value of its own."""

    async def task(k: int):
        with rewriter.config(numerics=VALUES[k % 3]):
            for _ in range(2 + k % 4):  # tasks begin and end in each other's blocks
                await asyncio.sleep(0)
            found = one()
            await asyncio.sleep(0)
            return [found, one()]

    async def every() -> list:
        return await asyncio.gather(*map(task, range(8)))

    return asyncio.run(every())


WANTED = [[VALUES[k % 3]] * 2 for k in range(8)]


def test_tasks_have_options_of_their_own():
    assert in_turns(lambda: current().numerics) == WANTED
    assert current() == Config()


def test_what_is_said_in_a_task_is_of_its_options():
    shared = rewriter.optimize(lambda x: jnp.cos(x))

    def explained():
        return rewriter.explain(jnp.sin)(1.0).numerics

    def reported():
        shared.trace(1.0)
        return shared.report(1.0).numerics

    def called():
        fresh = rewriter.optimize(lambda x: x + 1)
        fresh(1.0)
        return fresh.report().numerics

    for one in (explained, reported, called):
        assert in_turns(one) == WANTED
    traced = []

    @rewriter.optimize
    def seen(x):
        traced.append(current().numerics)
        return x

    seen(1.0)
    assert traced[-1] == "default"  # the thread is as it was before
    count = len(traced)
    seen(1.0)
    assert len(traced) == count


def test_a_program_of_another_tasks_options_is_not_kept():
    """JAX would keep it under the options of the task that came before."""
    seen = []

    @rewriter.optimize
    def fast(x):
        seen.append(current().numerics)
        return x

    async def first(entered: asyncio.Event, done: asyncio.Event):
        with rewriter.config(numerics="strict"):
            await entered.wait()
            fast(1.0)  # JAX takes it for one under "fast"
            done.set()

    async def second(entered: asyncio.Event, done: asyncio.Event):
        with rewriter.config(numerics="fast"):
            entered.set()
            await done.wait()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(first(*events), second(*events))

    asyncio.run(both())
    assert set(seen) == {"strict"}
    with rewriter.config(numerics="fast"):
        fast(1.0)
    assert seen[-1] == "fast"


def test_a_thread_that_a_tasks_context_is_handed_to():
    def said():
        fast = rewriter.optimize(jnp.sin)
        fast(1.0)  # as JAX has it, which knows threads only
        return current().numerics, fast.report().numerics, fast.report(1.0).numerics

    async def task():
        with rewriter.config(numerics="strict"):
            return await asyncio.to_thread(said)

    assert asyncio.run(task()) == ("strict", "default", "strict")


def test_measurements_are_a_tasks_own():
    def tuned(k: int) -> Tuned:
        return Tuned(((key(64 + k), ()),))

    async def task(k: int):
        with tuned(k):
            await asyncio.sleep(0)
            with tuned(100 + k):
                await asyncio.sleep(0)
                inner = current().tuned
            await asyncio.sleep(0)
            return inner, current().tuned

    async def every():
        return await asyncio.gather(*map(task, range(8)))

    for k, (inner, outer) in enumerate(asyncio.run(every())):
        assert inner == (tuned(k), tuned(100 + k))
        assert outer == (tuned(k),)
    assert current().tuned == ()
