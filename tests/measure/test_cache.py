"""Tuned choices on disk: merged, never lost; damage is reported and ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import jax
import pytest

import rewriter
from rewriter.errors import CacheWarning
from rewriter.measure import cache
from rewriter.support import atomic
from tests.measure.test_tuned import key, took


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache in a process that remembers nothing."""
    monkeypatch.setenv("REWRITER_CACHE_DIR", str(tmp_path / "cache"))
    cache._process.cache_clear()
    yield tmp_path / "cache"
    cache._process.cache_clear()


def found(t: int = 64) -> dict[str, float | None]:
    entries = dict(cache.entries("cpu", "attention"))
    return {m.implementation.text: m.median_us for m in entries.get(key(t), ())}


def test_one_file_per_key_and_kernel(folder) -> None:
    cache.add(key(), [took("xla", 9), took("fast", 5, rows=1), took("fast", 4, rows=2)])
    cache.add(key(128), [took("xla", 9)])
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.json"))
    assert [n.rsplit("-", 1)[0] for n in names] == [
        "cpu/attention/fast_1", "cpu/attention/xla", "cpu/attention/xla",
    ]  # fmt: skip
    data = json.loads((folder / names[0]).read_text())
    assert data["key"]["shapes"]["q"] == [1, 64, 2, 8]
    assert data["key"]["params"] == {
        "scale": "float", "softcap": None, "window": [None, 0],
    }  # fmt: skip
    configs = [m["implementation"]["config"] for m in data["measurements"]]
    assert configs == [{"rows": 1}, {"rows": 2}]
    assert found() == {"xla": 9, "fast (rows=1)": 5, "fast (rows=2)": 4}


def test_a_new_config_joins_the_others_and_a_new_time_replaces_the_old() -> None:
    cache.add(key(), [took("fast", 5, rows=1)])
    cache.add(key(), [took("fast", 7, rows=1), took("fast", 4, rows=2)])
    assert found() == {"fast (rows=1)": 7, "fast (rows=2)": 4}


def test_what_another_process_writes_is_merged(folder) -> None:
    cache.add(key(), [took("fast", 5, rows=1)])
    assert found() == {"fast (rows=1)": 5}
    code = (
        "from rewriter.measure import cache\n"
        "from tests.measure.test_tuned import key, took\n"
        "cache.add(key(), [took('fast', 4, rows=2)])\n"
        "cache.add(key(128), [took('fast', 3)])\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert found() == {"fast (rows=1)": 5, "fast (rows=2)": 4}
    assert found(128) == {"fast": 3}
    cache.add(key(), [took("fast", 6, rows=3)])
    assert len(found()) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0, "key": {}, "measurements": []}', '"x"']
)
def test_a_damaged_file_is_told_and_kept(folder, text: str) -> None:
    cache.add(key(), [took("fast", 5)])
    cache.add(key(128), [took("fast", 6)])
    keys = {p: json.loads(p.read_text())["key"] for p in folder.rglob("*.json")}
    (path,) = [p for p, k in keys.items() if k["shapes"]["q"][1] == 64]
    path.write_text(text)
    os.utime(path.parent)
    with pytest.warns(CacheWarning, match=rf"{path.name} is ignored"):
        assert found() == {}
    assert found(128) == {"fast": 6}
    assert len(cache.info().unreadable) == 1
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        cache.add(key(), [took("fast", 7)])
        assert found() == {"fast": 7}
    assert path.with_name(f"{path.name}.damaged").read_text() == text


def test_a_folder_that_cannot_be_written(folder, monkeypatch) -> None:
    def full(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(atomic, "write", full)
    with pytest.warns(CacheWarning, match=r"stay in memory: .*No space left"):
        cache.add(key(), [took("fast", 5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.add(key(128), [took("fast", 6)])
    assert found() == {"fast": 5}
    assert found(128) == {"fast": 6}
    assert cache.info().files == 0
    cache.clear()
    assert found() == {}


def test_a_file_in_the_way_of_the_folder(folder, tmp_path) -> None:
    folder.write_text("not a folder")
    with pytest.warns(CacheWarning, match="stay in memory"):
        cache.add(key(), [took("fast", 5)])
    assert found() == {"fast": 5}
    assert folder.read_text() == "not a folder"


def test_a_writer_that_dies_leaves_the_old_file(folder, monkeypatch) -> None:
    cache.add(key(), [took("fast", 5)])
    (path,) = folder.rglob("*.json")
    before = path.read_text()

    def dies(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        cache.add(key(), [took("fast", 6)])
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_info_and_clear(folder) -> None:
    cache.add(key(), [took("xla", 9), took("fast", 5)])
    cache.add(key(device="NVIDIA H200"), [took("xla", 9)])
    cache.add(key(op="rms_norm"), [took("xla", 9)])
    info = rewriter.cache.info()
    assert (info.path, info.files) == (str(folder), 4)
    assert dict(info.counts) == {
        ("cpu", "attention"): 1, ("cpu", "rms_norm"): 1,
        ("NVIDIA H200", "attention"): 1,
    }  # fmt: skip
    assert "NVIDIA H200  attention: 1" in str(info)
    other = folder / "cpu" / "notes.txt"
    other.write_text("mine")
    assert rewriter.cache.clear(op="attention", device="cpu") == 2
    assert cache.info().files == 2
    assert found() == {}
    assert rewriter.cache.clear() == 2
    assert other.read_text() == "mine"
    assert rewriter.cache.path() == str(folder)


def test_an_empty_cache_makes_no_folder(folder) -> None:
    assert cache.entries("cpu", "attention") == ()
    assert cache.info().files == 0
    rewriter.explain(jax.numpy.sin)(1.0)
    assert not folder.exists()
