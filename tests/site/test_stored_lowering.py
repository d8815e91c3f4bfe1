"""Lowered kernels on disk: read again for equal uses alone, and never needed."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import rewriter
from rewriter import _jax
from rewriter.ops.kernel import from_function
from rewriter.ops.registry import registry
from rewriter.site import lowering, stored_lowering
from rewriter.site.uses import Use
from rewriter.support import cache_folder, fingerprint

pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

TARGET = "NVIDIA H200"
ROWS = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
FORCED = {"rms_norm": "hopper"}
QUOTED = r'"((?:[^"\\]|\\.)*)"'
SCALE = jax.ShapeDtypeStruct((1024,), jnp.float32)


def norm(x: jax.Array, scale: jax.Array, eps: float = 1e-6) -> jax.Array:
    """An RMS norm."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def lowered(f: Callable[..., Any] = norm, *args: Any) -> str:
    """The program's text, as a process lowers it that read nothing yet."""
    stored_lowering._read.cache_clear()
    lowering._implementation.cache_clear()
    fast = rewriter.optimize(f, target=TARGET, implementation=FORCED)
    program = jax.jit(fast).trace(*args or (ROWS, SCALE))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    # Mosaic's code names the user's function, and JAX numbers those of one name.
    return re.sub(
        r"norm_\d+\\00", r"norm\\00", re.sub(f"kernel_hash = {QUOTED}", "", text)
    )


def kernels(text: str) -> list[str]:
    """Mosaic's code of the kernels in a program."""
    return re.findall(f"module = {QUOTED}", text)


def files() -> list[pathlib.Path]:
    """The stored kernels."""
    return sorted(pathlib.Path(cache_folder.lowered()).glob("*.bin"))


def never(*args: Any) -> Any:
    raise AssertionError(f"lowered again: {args}")


def test_a_second_process_reads_the_same_code(monkeypatch: Any) -> None:
    texts, counts = [], []
    for stored in ("0", "1", "1"):
        monkeypatch.setenv(stored_lowering.VARIABLE, stored)
        texts.append(lowered())  # one line: Mosaic's code names it
        counts.append(len(files()))
        if files():
            monkeypatch.setattr(_jax, "exported", never)
    assert counts == [0, 1, 1]
    assert texts[1] == texts[2]
    assert [len(kernels(t)) for t in texts] == [1, 1, 1]
    # The number of the user's function may have one more digit, and its length is told.
    sizes = [len(kernels(t)[0]) for t in texts]
    assert max(sizes) - min(sizes) <= 8


def test_gradients_are_stored_beside_results(monkeypatch: Any) -> None:
    both = jax.grad(lambda x, scale: norm(x, scale).sum(), (0, 1))
    first = lowered(both)
    count = len(files())
    assert count == len(set(kernels(first))) > 0
    monkeypatch.setattr(_jax, "exported", never)
    assert lowered(both) == first


@pytest.mark.once
@pytest.mark.parametrize(
    "other",
    [
        lambda: lowered(norm, jax.ShapeDtypeStruct((4096, 2048), jnp.float32),
                        jax.ShapeDtypeStruct((2048,), jnp.float32)),
        lambda: lowered(norm, jax.ShapeDtypeStruct(ROWS.shape, jnp.bfloat16), SCALE),
        lambda: lowered(lambda x, scale: norm(x, scale, 1e-5)),
        lambda: lowered(jax.grad(lambda x, scale: norm(x, scale).sum())),
    ],
    ids=["shape", "dtype", "eps", "gradients"],
)  # fmt: skip
def test_another_use_is_another_file(other: Callable[[], str]) -> None:
    first = lowered()
    made = set(files())
    second = other()
    assert kernels(second) != kernels(first)
    assert len(set(files()) - made) >= 1


def test_another_state_of_jax_is_another_file(monkeypatch: Any) -> None:
    lowered()
    with jax.default_matmul_precision("highest"):
        lowered()
    assert len(files()) == 2
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    lowered()
    assert len(files()) == 3


def test_other_code_of_the_package_is_another_file(monkeypatch: Any) -> None:
    lowered()
    monkeypatch.setattr(fingerprint, "of_package", lambda: "other")
    lowered()
    assert len(files()) == 2


@pytest.mark.once
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: b"x" + data,
     lambda data: data[:-9] + b"12345678" + data[-1:]],
    ids=["empty", "cut", "other", "bits"],
)  # fmt: skip
def test_a_damaged_file_is_written_again(damage: Callable[[bytes], bytes]) -> None:
    texts = []
    for damaged in (False, True, False):
        for file in files() if damaged else ():
            file.write_bytes(damage(file.read_bytes()))
        texts.append(lowered())  # one line: Mosaic's code names it
    assert len(set(texts)) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch: Any) -> None:
    monkeypatch.setenv("REWRITER_CACHE_DIR", "/dev/null/inside")
    for _ in range(2):
        assert len(kernels(lowered())) == 1
        monkeypatch.setattr(_jax, "exported", never)  # it is not tried again


def test_a_kernel_of_the_users_has_no_text() -> None:
    op = registry().op("rms_norm")
    mine = from_function(norm, op, platforms=("cuda",))
    ours = next(k for k in registry().kernels("rms_norm") if k.name == "hopper")
    names, eps = ("x", "scale"), (("eps", 1e-6),)
    assert stored_lowering._text_of_use(Use(op, names, eps, (("cuda", ours),)))
    with pytest.raises(fingerprint.NotPlain, match="test_stored_lowering"):
        stored_lowering._text_of_use(Use(op, names, eps, (("cuda", mine),)))


def test_an_export_is_lowered_by_itself() -> None:
    fast = rewriter.optimize(norm, target=TARGET, implementation=FORCED)
    made = jax.export.export(jax.jit(fast), platforms=("cuda",))(ROWS, SCALE)
    assert len(kernels(made.mlir_module())) == 1
    assert not files()


def test_equal_layers_are_one_function() -> None:
    def layers(x: jax.Array, scale: jax.Array) -> jax.Array:
        return norm(jnp.sin(norm(x, scale)), scale)

    text = lowered(layers)
    assert len(kernels(text)) == 1
    assert text.count("call @rewriter_site_rms_norm") == 2


def test_measurements_do_not_see_the_folder() -> None:
    before = rewriter.cache.info().files
    lowered()
    assert rewriter.cache.info().files == before
    assert rewriter.cache.clear() == before
    assert len(files()) == 1


def test_the_oldest_are_removed(monkeypatch: Any) -> None:
    monkeypatch.setattr(stored_lowering, "MOST_FILES", 1)
    monkeypatch.setattr(stored_lowering, "REMOVED", 1)
    lowered()
    (first,) = files()
    lowered(lambda x, scale: norm(x, scale, 1e-5))
    assert len(files()) == 1
    assert files() != [first]


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
def test_stored_kernels_compute_the_same_bits(monkeypatch: Any) -> None:
    """Without the store, by the process that stores, and by one that reads."""
    x, up = jax.random.normal(jax.random.key(0), (2, *ROWS.shape), ROWS.dtype)
    scale = jnp.linspace(0.5, 1.5, SCALE.shape[0])

    def both(x: jax.Array, scale: jax.Array, up: jax.Array) -> Any:
        out, back = jax.vjp(norm, x, scale)
        return out, back(up)

    results = []
    for stored in ("0", "1", "1"):
        monkeypatch.setenv(stored_lowering.VARIABLE, stored)
        stored_lowering._read.cache_clear()
        lowering._implementation.cache_clear()
        fast = rewriter.optimize(both, implementation=FORCED)
        results.append(jax.tree.leaves(fast(x, scale, up)))
        jax.clear_caches()
    assert len(files()) > 0
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a == b).all()
    wanted = jax.tree.leaves(both(x, scale, up))
    for a, b in zip(results[0], wanted, strict=True):
        assert jnp.abs(a - b).max() <= 1e-3 * jnp.abs(b).max()
