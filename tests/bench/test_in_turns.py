"""Scripts that prepare in several processes and measure one by one."""

import pathlib
import sys

from tests.bench import in_turns

SCRIPT = """
import json, pathlib, time
from tests.bench import in_turns

def measure(given, names):
    if names == ["bad"]:
        raise SystemExit(1)
    with in_turns.turn():
        busy = pathlib.Path(__file__).with_name("busy")
        busy.touch(exist_ok=False)  # nobody else measures
        time.sleep(0.1)
        busy.unlink()
    in_turns.write(given.json, [{"model": name} for name in names])

given = in_turns.parser(None).parse_args()
rows = in_turns.rows_of("turns_script", ["a", "bad", "c1", "c2"], given, measure)
if rows is not None:
    pathlib.Path(given.json).write_text(json.dumps(rows))
"""


def measured(tmp_path: pathlib.Path, monkeypatch, *words: str) -> list[str]:
    """The names in the rows of a script, with these arguments."""
    (tmp_path / "turns_script.py").write_text(SCRIPT)
    root = pathlib.Path(in_turns.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    given = in_turns.parser(None).parse_args(words)
    monkeypatch.setattr(sys, "argv", ["turns_script", *words])
    names = ["a", "bad", "c1", "c2"]
    rows = in_turns.rows_of("turns_script", names, given, lambda *_: None)
    assert rows is not None
    return [row["model"] for row in rows]


def test_processes_measure_in_turns_and_one_that_fails_stops_no_other(
    tmp_path: pathlib.Path, monkeypatch
) -> None:
    assert measured(tmp_path, monkeypatch, "--processes", "4") == ["a", "c1", "c2"]


def test_one_process_measures_what_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch
) -> None:
    assert measured(tmp_path, monkeypatch, "--only", "c") == ["c1", "c2"]
