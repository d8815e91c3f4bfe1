"""Measurements: who wins, how they are written, merged and put in force."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.config import Config
from rewriter.errors import BundleMismatch, CacheWarning
from rewriter.measure.decision import fastest
from rewriter.measure.key import Key, key_of, nearest
from rewriter.measure.measurement import Measurement
from rewriter.measure.sources import shipped, tiled_axes
from rewriter.measure.tuned import Tuned
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from rewriter.run import rewriting
from rewriter.site.implementation import Implementation

pytestmark = pytest.mark.once

MIB = 1 << 20
SPEC = Spec(
    "attention",
    (("q", (1, 64, 2, 8)), ("k", (1, 64, 2, 8)), ("v", (1, 64, 2, 8))),
    (("q", "float32"), ("k", "float32"), ("v", "float32")),
    (("scale", 0.3535), ("softcap", None), ("window", (None, 0))),
)


def took(name: str, us: float | None, mib: int = 0, sigma: float = 0.0, **config):
    made = Implementation(name, config=tuple(config.items()) or None)
    return Measurement(
        made, name if name == "xla" else f"{name} 1", jax.__version__, us,
        sigma_us=sigma, runs=20, temp_bytes=mib * MIB, problem="" if us else "broken",
    )  # fmt: skip


def key(t: int = 64, **changes) -> Key:
    spec = dataclasses.replace(
        SPEC, shapes=tuple((n, (1, t, 2, 8)) for n, _ in SPEC.shapes)
    )
    return dataclasses.replace(key_of(spec, "forward", "cpu"), **changes)


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([took("xla", 100), took("fast", 50)], "fast"),
        ([took("xla", 100), took("fast", 99)], "xla"),  # within 2 %
        ([took("xla", 100, sigma=20), took("fast", 90, sigma=20)], "xla"),  # in noise
        ([took("xla", 100, 300), took("small", 101, 10)], "small"),  # saves memory
        ([took("xla", 100, 300), took("small", 110, 10)], "xla"),  # but too slow
        ([took("xla", 100, 60), took("small", 100, 1)], "xla"),  # and saves little
        ([took("xla", None), took("fast", 500), took("slow", 900)], "fast"),
        ([took("xla", 100), took("fast", None)], "xla"),
        ([took("xla", 100, 9), took("a", 50, 900), took("b", 50.5, 9)], "b"),
    ],
)
def test_who_wins(measured, best: str) -> None:
    for order in (measured, measured[::-1]):
        decision = fastest(order)
        assert decision is not None
        assert decision.best.implementation.forward == best
        assert {n for n, _ in decision.lost} == {
            m.implementation.name for m in measured
        } - {best}


def test_nothing_wins_where_nothing_runs() -> None:
    assert fastest([took("xla", None)]) is None
    assert fastest([]) is None


def test_the_key_has_what_changes_the_time_and_nothing_else() -> None:
    other = dict(SPEC.params)
    same = {**other, "scale": 0.125}
    assert key_of(_with(same), "forward", "cpu") == key_of(SPEC, "forward", "cpu")
    for change in ({"window": (16, 0)}, {"softcap": 30.0}):
        found = key_of(_with({**other, **change}), "forward", "cpu")
        assert found != key_of(SPEC, "forward", "cpu")
    with jax.default_matmul_precision("highest"):
        assert key_of(SPEC, "forward", "cpu").precision == "highest"


def test_leading_axes_and_implied_dtypes_do_not_make_another_key() -> None:
    op = registry().op("rms_norm")

    def norm(*shape, **params):
        given = {"x": jax.ShapeDtypeStruct(shape, "bfloat16"),
                 "scale": jax.ShapeDtypeStruct(shape[-1:], "bfloat16")}  # fmt: skip
        return key_of(spec_of(op, given, params), "forward", "cpu")

    assert norm(2, 3, 4, 8) == norm(24, 8) == norm(6, 4, 8, out_dtype="bfloat16")
    assert norm(24, 8) != norm(24, 8, out_dtype="float32")
    assert norm(8).shapes[0] == ("x", (8,))
    assert norm(24, 8) != norm(8, 24)


def _with(params) -> Spec:
    return dataclasses.replace(SPEC, params=tuple(sorted(params.items())))


def test_nearest_shapes() -> None:
    far, near = (took("xla", 1.0),), (took("xla", 2.0),)
    entries = [(key(1024), far), (key(128), near)]
    assert nearest(entries, key(100)) == near
    assert nearest(entries, key(600)) == far
    assert nearest(entries, key(16)) == ()
    for change in ({"device": "gpu"}, {"precision": "highest"}, {"passes": "vjp"}):
        assert nearest(entries, key(128, **change)) == ()
    dtypes = tuple((n, "bfloat16") for n, _ in SPEC.dtypes)
    assert nearest(entries, key(128, dtypes=dtypes)) == ()


def test_tiles_of_other_heads_are_not_near() -> None:
    """A config for heads of 128 says nothing about heads of 64."""
    equal = tiled_axes("attention")
    assert set(equal) == {"q", "k", "v"}
    assert not tiled_axes("rms_norm")

    def of(t: int, h: int) -> Key:
        shapes = tuple((x, (2, t, 4, h)) for x in "qkv")
        dtypes = tuple((x, "bfloat16") for x in "qkv")
        return Key("attention", "forward", shapes, dtypes, (), "gpu")

    entries = [(of(1024, 128), (took("xla", 1.0),))]
    assert nearest(entries, of(2048, 128), equal)
    assert nearest(entries, of(1024, 64))
    assert not nearest(entries, of(1024, 64), equal)


def test_text_and_back() -> None:
    mixed = Implementation("a", "b", (("rows", 8), ("order", (1, 2))), (("n", None),))
    measured = (
        took("xla", 3.5, 7), took("fast", None),
        dataclasses.replace(took("a", 1.0), implementation=mixed),
    )  # fmt: skip
    tuned = Tuned(((key(), measured),))
    again = Tuned.loads(tuned.dumps())
    assert again == tuned
    assert hash(again) == hash(tuned)
    assert again.find(key()) == measured
    text = tuned.table()
    assert "✗ broken" in text
    assert "a, backward b (rows=8, order=(1, 2); backward n=None)" in text
    assert "✓ chosen" in text


def test_merging_lets_the_right_one_win() -> None:
    a = Tuned(((key(), (took("xla", 1), took("fast", 5))),))
    b = Tuned(((key(), (took("fast", 7),)), (key(128), (took("xla", 2),))))
    merged = a | b
    assert [m.median_us for m in merged.find(key())] == [1, 7]
    assert merged.find(key(128)) == b.find(key(128))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 99, "entries": []}', '{"format": 1}',
             '{"format": 1, "entries": [{"key": {}}]}'],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BundleMismatch, match=r"holds no tuned choices.*rewriter.tune"):
        Tuned.loads(text)


def test_files(tmp_path) -> None:
    tuned = Tuned(((key(), (took("xla", 1),)),))
    path = tmp_path / "t.json"
    tuned.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    assert Tuned.load(path, strict=True) == tuned
    with pytest.raises(FileNotFoundError):
        tuned.save(tmp_path / "no" / "t.json")
    elsewhere = Tuned(((key(device="NVIDIA H200"), (took("xla", 1),)),))
    elsewhere.save(path)
    with pytest.warns(CacheWarning, match="tuned for NVIDIA H200, this is cpu"):
        Tuned.load(path)
    with pytest.raises(BundleMismatch, match="Tune again here"):
        Tuned.load(path, strict=True)
    old = dataclasses.replace(took("xla", 1), jax="0.1")
    Tuned(((key(), (old,)),)).save(path)
    with pytest.warns(CacheWarning, match="tuned with jax 0.1, not"):
        Tuned.load(path)


def test_in_a_with_block_functions_are_traced_again() -> None:
    tuned = Tuned(((key(), (took("xla", 1),)),))
    seen = []

    @jax.jit
    def f(x):
        seen.append(rewriter.config)
        return x

    f(1.0)
    with tuned:
        f(1.0)
        with tuned:
            f(1.0)
        f(1.0)
    f(1.0)
    assert len(seen) == 3  # outside, inside, inside twice; then each is found again


def test_a_with_block_is_the_threads_own() -> None:
    from rewriter.config import current

    tuned, seen = Tuned(((key(), (took("xla", 1),)),)), []
    with tuned:
        thread = threading.Thread(target=lambda: seen.append(current().tuned))
        thread.start()
        thread.join()
        assert current().tuned == (tuned,)
    assert seen == [()]
    assert current().tuned == ()


def test_choices_from_a_file(tmp_path) -> None:
    def attention(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
        keep = jnp.tril(jnp.ones((64, 64), bool))
        weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
    (plain,) = rewriter.explain(attention)(x, x, x).sites
    assert plain.kernel == "xla"  # by rule of thumb it is too small
    (task,) = rewriting.tasks(jax.make_jaxpr(attention)(x, x, x), Config())
    used = task.key(device.attached())
    blocks = {"rows": 16, "keys": 16, "tile": 2048, "lines": 1 << 19}
    measured = (took("xla", 9.0), took("memory_bounded", 1.0, **blocks))
    path = tmp_path / "t.json"
    Tuned(((used, measured),)).save(path)
    fast = rewriter.optimize(attention, tuned=str(path), tune="off")
    (site,) = fast.report(x, x, x).sites
    assert (site.kernel, site.origin) == ("memory_bounded", "tuned")
    assert "rows=16" in site.config
    assert dict(site.not_chosen)["xla"].startswith("9.00 times as long")
    assert "stablehlo.while" in fast.lower(x, x, x).as_text()  # over blocks of 16
    assert jnp.allclose(fast(x, x, x), attention(x, x, x), atol=1e-5)

    unknown = took("memory_bounded", 1.0, columns=3)  # no field of its config
    Tuned(((used, (took("xla", 9.0), unknown)),)).save(path)
    fast = rewriter.optimize(attention, tuned=str(path), tune="off", strict=True)
    assert {s.kernel for s in fast.report(x, x, x).sites} == {"xla"}


RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"


def test_files_of_earlier_versions_are_read() -> None:
    """What was measured before there were distributions, digests, clocks."""
    old = Tuned.loads((RESULTS / "tuned_h200.json").read_text())
    assert len(old) > 60
    assert Tuned.loads(old.dumps()) == old
    for op in registry().ops():
        for found, measured in shipped(op).entries:
            assert found.op == op
            assert fastest(measured) is not None or not measured
            assert not any(m.spelling for m in measured)
        assert not shipped(op).entries or op in shipped(op).table()
    assert "attention" in shipped("attention").table()
    assert "xla (as usually written)" in old.table()
    assert "nothing could be timed" in Tuned(((key(), ()),)).table()


CHOSEN = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
import rewriter

def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
    keep = jnp.tril(jnp.ones((64, 64), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)

def loss(q, k, v):
    return jnp.sum(attention(q, k, v) ** 2)

def outputs(path):
    x = [jax.random.normal(jax.random.key(i), (1, 64, 2, 8)) for i in range(3)]
    digest, kernels = hashlib.sha256(), []
    for fn in (attention, jax.value_and_grad(loss, (0, 1, 2))):
        fast = rewriter.optimize(fn, tuned=path, tune="off")
        kernels += [f"{s.kernel} {s.config} {s.origin}" for s in fast.report(*x).sites]
        for leaf in jax.tree.leaves(fast(*x)):
            digest.update(np.asarray(leaf).tobytes())
    return "; ".join(kernels) + " " + digest.hexdigest()
"""


def test_a_bundle_gives_the_same_bits_in_another_process(tmp_path) -> None:
    """What was tuned here chooses alike there, and computes the very same numbers."""
    space: dict = {}
    exec(CHOSEN, space)
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    found = Tuned()
    for fn in (space["attention"], jax.value_and_grad(space["loss"], (0, 1, 2))):
        found |= rewriter.tune(fn, level="quick")(x, x, x)
    assert {k.passes for k, _ in found.entries} == {"forward", "forward_and_vjp"}
    # Make the kernel win, whatever this machine says: XLA alone would prove little.
    won = tuple(
        (k, tuple(dataclasses.replace(m, median_us=1e6) if "xla" in m.version
                  else m for m in ms))
        for k, ms in found.entries
    )  # fmt: skip
    path = str(tmp_path / "t.json")
    Tuned(won).save(path)
    mine = space["outputs"](path)
    assert mine.count("memory_bounded") == 2
    assert mine.count("tuned") == 2
    code = f"{CHOSEN}\nprint(outputs({path!r}))"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "REWRITER_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True,
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == mine
