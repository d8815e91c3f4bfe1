"""What becomes of programs whose process is lost: none counts as checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soundness.pool import (
    ABORTED,
    NOT_REACHED,
    UNFINISHED,
    USUAL,
    Checked,
    Limits,
    NotRun,
    Task,
    lost,
    run,
)
from tests.soundness.worker import Key, Request

KEYS = tuple(Key("norm", seed) for seed in range(3))
TOGETHER = Task(Request(KEYS, gradients=True))
ALONE = Task(Request(KEYS[:1], gradients=True))


@pytest.mark.parametrize("why", [ABORTED, UNFINISHED])
def test_programs_that_were_together_are_checked_alone(why: str) -> None:
    outcomes, more = lost(TOGETHER, why)
    assert not outcomes
    assert [task.request.keys for task in more] == [(key,) for key in KEYS]


def test_one_that_aborts_is_compiled_as_usual_then_as_it_is_written() -> None:
    usual = replace(ALONE, flags=USUAL)
    assert lost(ALONE, ABORTED) == ([], [usual])
    outcomes, (written,) = lost(usual, ABORTED)
    assert not outcomes
    assert written.request.only_written
    assert lost(written, ABORTED) == ([NotRun(KEYS[0], ABORTED)], [])


def test_one_that_takes_too_long_is_not_run() -> None:
    assert lost(ALONE, UNFINISHED) == ([NotRun(KEYS[0], UNFINISHED)], [])


@pytest.mark.once
@pytest.mark.parametrize(
    ("limits", "why"),
    [(Limits(task=0.01), UNFINISHED), (Limits(9.0, whole=0.01), NOT_REACHED)],
)
def test_processes_end_in_time(limits: Limits, why: str, tmp_path: Path) -> None:
    assert set(run(KEYS[:1], False, 1, limits, str(tmp_path))) == {NotRun(KEYS[0], why)}


@pytest.mark.once
def test_programs_are_checked(tmp_path: Path) -> None:
    (checked,) = run(KEYS[:1], False, 1, Limits(500.0), str(tmp_path))
    assert isinstance(checked, Checked)
    assert checked.keys == KEYS[:1]
    assert not checked.reply.findings
