"""Files of measurements that are not what they should be: told once, and no harm."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import warnings

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.config import Config
from rewriter.errors import BundleMismatch, CacheWarning, ConfigError
from rewriter.measure import cache, sources
from rewriter.measure.tuned import Tuned
from rewriter.ops import device
from rewriter.run import rewriting
from rewriter.support import regular_files
from tests.measure.test_tuned import key, took

pytestmark = pytest.mark.once


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    """A file of the cache with two configs; that of another key lies beside it."""
    cache.add(key(), [took("fast", 5, rows=1), took("fast", 4, rows=2)])
    (path,) = (tmp_path / "cache").rglob("*.json")
    cache.add(key(128), [took("fast", 6)])
    return path


def times(t: int = 64) -> dict[str, float | None]:
    entries = dict(cache.entries("cpu", "attention"))
    return {m.implementation.text: m.median_us for m in entries.get(key(t), ())}


def told(text: str) -> CacheWarning:
    """The one warning of several readings and a writing."""
    cache._process.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        times()
        assert times(128) == {"fast": 6}
        assert len(cache.info().unreadable) == 1
        times()
    (one,) = found
    assert isinstance(one.message, CacheWarning)
    assert text in str(one.message)
    return one.message


BIG = "<a number of 401 digits>"


def set_in(path: pathlib.Path, where: tuple, value: object) -> None:
    """Puts a value into a file's JSON."""
    data = part = json.loads(path.read_text())
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    path.write_text(json.dumps(data).replace(f'"{BIG}"', "1" + 400 * "0"))


SECOND = ("measurements", 1)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("median_us",), v)
        for v in (-1, 0, -0.0, True, "4", [4], {}, 1e16, BIG, float("nan"),
                  float("inf"), -float("inf"))
    ] + [
        (("sigma_us",), -1.0), (("sigma_us",), float("nan")), (("runs",), 2.5),
        (("runs",), -1), (("temp_bytes",), BIG), (("clock_mhz",), "fast"),
        (("version",), None), (("version",), ""), (("jax",), ["0.11"]),
        (("problem",), 3), (("note",), "\ud800"), (("by_inputs",), [["a", 1]]),
        (("by_inputs",), {"uniform": -2}), (("more",), 1),
        (("implementation",), "fast"), (("implementation", "forward"), 7),
        (("implementation", "backward"), {}), (("implementation", "config"), [1]),
        (("implementation", "config"), {"rows": {"deep": 1}}),
        (("implementation", "config"), {"rows": BIG}),
        (("implementation", "other"), 1),
    ],
)  # fmt: skip
def test_a_bad_record_is_dropped_alone(path, where, value) -> None:
    set_in(path, (*SECOND, *where), value)
    warning = told("measurements[1]")
    assert str(path) in str(warning)
    assert "tune again" in str(warning)
    assert times() == {"fast (rows=1)": 5}
    cache.add(key(), [took("fast", 3, rows=3)])
    assert times() == {"fast (rows=1)": 5, "fast (rows=3)": 3}
    assert path.with_name(f"{path.name}.damaged").exists()
    assert cache.info().unreadable == ()


@pytest.mark.parametrize("record", [None, 3, [], "x", {}])
def test_a_record_that_is_none(path, record) -> None:
    set_in(path, SECOND, record)
    told("measurements[1]")
    assert times() == {"fast (rows=1)": 5}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((), 3), (("op",), []), (("device",), None), (("shapes",), []),
        (("shapes", "q"), 3), (("shapes", "q"), [1, -1]), (("shapes", "q"), [BIG]),
        (("shapes", "q"), [1.5]), (("shapes", "x"), [1]), (("dtypes", "q"), 1),
        (("params",), "none"), (("params", "scale"), {"a": 1}), (("precision",), 1),
        (("more",), 1),
    ],
)  # fmt: skip
def test_a_bad_key_is_a_bad_file(path, where, value) -> None:
    set_in(path, ("key", *where), value)
    told(str(path))
    assert times() == {}
    cache.add(key(), [took("fast", 3)])
    assert times() == {"fast": 3}


def fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def a_socket(path: pathlib.Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def gigantic(path: pathlib.Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # of holes


OTHERS = {
    "a pipe": fifo,
    "a socket": a_socket,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "gigantic": gigantic,
    "not UTF-8": lambda path: path.write_bytes(b'{"format": "\xff\xfe'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep and right": lambda path: path.write_text("[" * 9999 + "]" * 9999),
    "many digits": lambda path: path.write_text("1" * 10_000),
    "empty": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_of_text(path, kind: str) -> None:
    path.unlink()
    OTHERS[kind](path)
    told(str(path))
    assert times() == {}
    cache.add(key(), [took("fast", 3)])
    assert times() == {"fast": 3}
    assert cache.clear() == 2


def test_a_file_that_was_cut_off(path) -> None:
    path.write_bytes(path.read_bytes()[:-40])
    told("not JSON")


def test_a_pipe_instead_of_a_folder(tmp_path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("REWRITER_CACHE_DIR", str(tmp_path / "pipe"))
    assert cache.entries("cpu", "attention") == ()
    assert cache.info().files == 0
    with pytest.warns(CacheWarning, match="Set REWRITER_CACHE_DIR to a folder that"):
        cache.add(key(), [took("fast", 5)])
    assert times() == {"fast": 5}


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "x").write_text("12345")
    assert regular_files.read_text(str(tmp_path / "x"), 5) == "12345"
    monkeypatch.setattr(regular_files, "_check", lambda found, most: None)
    with pytest.raises(ValueError, match="more than 4 bytes"):
        regular_files.read_text(str(tmp_path / "x"), 4)


# ---------------------------------------------------------------- given by name
@pytest.mark.parametrize("kind", [k for k in OTHERS if "link" not in k])
def test_a_file_that_is_given(tmp_path, kind: str) -> None:
    path = tmp_path / "t.json"
    OTHERS[kind](path)
    if kind == "gigantic":
        os.truncate(path, 1 << 41)
    with pytest.raises(BundleMismatch, match=r"t\.json holds no tuned choices.*tune"):
        Tuned.load(path)
    with pytest.raises((BundleMismatch, ConfigError), match=r"tuned='.*t\.json'"):
        rewriter.optimize(jnp.sin, tuned=str(path))


def test_a_bad_record_of_what_is_given_is_an_error(tmp_path) -> None:
    path = tmp_path / "t.json"
    Tuned(((key(), (took("xla", 1), took("fast", 2))),)).save(path)
    set_in(path, ("entries", 0, *SECOND, "median_us"), -1)
    text = r"entries\[0\]\.measurements\[1\]\.median_us is -1; expected finite"
    with pytest.raises(BundleMismatch, match=rf"tuned='.*t\.json'.*{text}"):
        rewriter.optimize(jnp.sin, tuned=path)
    bad = Tuned(((key(), (took("xla", float("nan")),)),))
    with pytest.raises(BundleMismatch, match=r"tuned=.*median_us is nan"):
        rewriter.optimize(jnp.sin, tuned=bad)
    with pytest.raises(BundleMismatch, match="median_us is nan"), bad:
        pass
    for entries in ((3,), ((key(), 3),), ((1, ()),)):
        with pytest.raises(BundleMismatch, match=r"entries\[0\]"):
            rewriter.optimize(jnp.sin, tuned=Tuned(entries))  # type: ignore[arg-type]


def test_a_bad_record_of_the_package_is_told(tmp_path) -> None:
    path = tmp_path / "t.json"
    Tuned(((key(), (took("xla", 1), took("fast", 2))),)).save(path)
    set_in(path, ("entries", 0, *SECOND, "median_us"), "soon")
    with pytest.warns(CacheWarning, match=r"t\.json is ignored.*Install"):
        found = sources._shipped(str(path))
    assert [m.implementation.name for m in found.find(key())] == ["xla"]
    path.write_text("{")
    with pytest.warns(CacheWarning, match=r"t\.json is ignored: it is not JSON"):
        assert len(sources._shipped(str(path))) == 0


# ------------------------------------------------------------ what a kernel takes
def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
    keep = jnp.tril(jnp.ones((64, 64), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"rows": -1}, {"rows": "16"}, {"rows": None}, {"rows": 1.5},
     {"rows": True}, {"keys": 0}, {"tile": -3}, {"rows": (1, 2)}],
)  # fmt: skip
def test_configs_that_a_kernel_cannot_have(change) -> None:
    """A record in due form that would end in a division by zero is as if not there."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    (task,) = rewriting.tasks(jax.make_jaxpr(attention)(x, x, x), Config())
    used = task.key(device.attached())
    blocks = {"rows": 16, "keys": 16, "tile": 2048, "lines": 1 << 19}
    for more, kernel in (({}, "memory_bounded"), (change, "xla")):
        bad = took("memory_bounded", 1.0, **{**blocks, **more})
        cache.add(used, [took("xla", 9.0), bad])
        fast = rewriter.optimize(attention, strict=True)
        (site,) = fast.report(x, x, x).sites
        assert site.kernel == kernel
        cache.clear()
