"""Artifacts: several platforms, symbolic sizes, gradients, damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.errors import DeviceMismatch, ExportError, TraceError
from tests.support.programs import FORCED, block, inputs


def specs(args):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


@pytest.fixture(scope="module")
def artifact():
    return rewriter.export(block, implementation=FORCED)(*specs(inputs()))


def test_same_numbers_and_gradients(artifact, tmp_path):
    artifact.save(tmp_path / "block")
    loaded = rewriter.load(tmp_path / "block")
    params, x = inputs()
    np.testing.assert_allclose(loaded.call(params, x), block(params, x), atol=1e-5)
    got, want = (
        jax.grad(lambda p, f=f: jnp.sum(f(p, x) ** 2))(params)
        for f in (loaded.call, block)
    )
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_manifest(artifact):
    manifest = artifact.manifest
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"]
    assert {s["op"] for s in manifest["sites"]} == {"attention", "rms_norm"}
    assert all(s["where"].startswith("programs.py:") for s in manifest["sites"])
    assert manifest["custom_calls"] == []
    assert manifest["vjp_order"] == 1
    json.dumps(manifest, default=str)


def test_runs_without_rewriter(artifact, tmp_path):
    (tmp_path / "program").write_bytes(artifact.serialize())
    params, x = inputs()
    np.savez(tmp_path / "in.npz", x=x, **params)
    code = (
        "import sys; sys.modules['rewriter'] = None\n"
        "import jax.export, numpy as np\n"
        "e = jax.export.deserialize(bytearray(open('program', 'rb').read()))\n"
        "d = np.load('in.npz')\n"
        "out = e.call({k: d[k] for k in ('scale', 'qkv')}, d['x'])\n"
        "np.save('out.npy', out)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["JAX_PLATFORMS"] = "cpu"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    got = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(got, block(params, x), atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="exports on a CPU host")
def test_symbolic_batch():
    params, x = inputs()
    (size,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    platforms = ("cpu", "tpu")
    run = rewriter.export(block, platforms=platforms, implementation=FORCED)
    artifact = run(specs(params), spec)
    kernels = {s["op"]: s["kernel"] for s in artifact.manifest["sites"]}
    assert kernels == {"rms_norm": "memory_bounded", "attention": "memory_bounded"}
    for batch in (1, 3):
        given = jnp.concatenate([x] * 3)[:batch]
        np.testing.assert_allclose(
            artifact.call(params, given), block(params, given), atol=1e-5
        )


def test_damaged_files(artifact, tmp_path):
    path = tmp_path / "a"
    artifact.save(path)
    assert sorted(os.listdir(tmp_path)) == ["a", "a.manifest.json"]
    path.write_bytes(b"x" + artifact.serialize()[1:])
    with pytest.raises(ExportError, match="is damaged: its SHA-256"):
        rewriter.load(path)
    manifest = tmp_path / "a.manifest.json"
    manifest.write_text("{")
    with pytest.raises(ExportError, match=r"manifest\.json is damaged"):
        rewriter.load(path)
    manifest.write_text('{"format": 99}')
    with pytest.raises(ExportError, match="has format 99; expected 1"):
        rewriter.load(path)
    manifest.unlink()
    with pytest.raises(ExportError, match="keep them together"):
        rewriter.load(path)
    with pytest.raises(ExportError, match="cannot write"):
        artifact.save(tmp_path / "missing" / "a")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="exports on a CPU host")
def test_other_devices(tmp_path):
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    rewriter.export(jnp.sin, platforms=("tpu",))(spec).save(tmp_path / "a")
    with pytest.raises(DeviceMismatch, match="built for tpu, this is cpu"):
        rewriter.load(tmp_path / "a")
    assert rewriter.load(tmp_path / "a", any_device=True).exported.platforms
    run = rewriter.export(jnp.sin, targets={"cpu": "Z80"})
    run(spec).save(tmp_path / "b")
    with pytest.raises(DeviceMismatch, match="built for Z80, this is cpu"):
        rewriter.load(tmp_path / "b")


def test_what_cannot_be_exported():
    with pytest.raises(ExportError, match="no platform 'gpu'"):
        rewriter.export(block, platforms=("gpu",))

    def calls_back(x):
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(ExportError, match="calls_back cannot be exported") as caught:
        rewriter.export(calls_back)(jnp.ones(2))
    assert caught.value.__cause__ is not None
    with pytest.raises(TraceError):
        rewriter.export(lambda x: x if x > 0 else -x)(1.0)


def test_targets_decide_what_is_exported_for_their_platform(monkeypatch) -> None:
    """Measurements of a device that is not here choose the kernel for it."""
    from rewriter.config import Config
    from rewriter.measure import sources
    from rewriter.measure.measurement import Measurement
    from rewriter.measure.tuned import Tuned
    from rewriter.ops import device
    from rewriter.run import rewriting
    from rewriter.site.implementation import Implementation

    def experts(lhs, rhs, sizes):
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    args = (
        jax.ShapeDtypeStruct((64, 8), jnp.float32),
        jax.ShapeDtypeStruct((4, 8, 8), jnp.float32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    (task,) = rewriting.tasks(jax.make_jaxpr(experts)(*args), Config())
    loop = Implementation("memory_bounded", config=(("rows", 16),))
    times = (Measurement(Implementation(), "xla", "any", 9.0),
             Measurement(loop, "memory_bounded 1", "any", 1.0))  # fmt: skip
    made = Tuned(((task.key(device.named("h200")), times),))
    monkeypatch.setattr(sources, "shipped", lambda *_: made)
    uncached = sources._shipped_for.__wrapped__
    monkeypatch.setattr(sources, "_shipped_for", uncached)

    def loops(**options) -> bool:
        artifact = rewriter.export(experts, platforms=("cuda",), **options)(*args)
        return "stablehlo.while" in artifact.exported.mlir_module()

    assert not loops()
    assert loops(targets={"cuda": "h200"})
    assert not loops(targets={"cuda": "NVIDIA Z80"})
    artifact = rewriter.export(
        experts, platforms=("cuda",), targets={"cuda": "h200"}
    )(*args)  # fmt: skip
    assert artifact.manifest["targets"] == {"cuda": "NVIDIA H200"}


def test_the_manifest_names_the_kernel_of_each_platform() -> None:
    """One artifact holds a loop for CPUs, plain JAX for GPUs, a kernel for TPUs."""

    def attention(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 128**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((2048, 2048), bool)), scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    x = jax.ShapeDtypeStruct((1, 2048, 4, 128), jnp.bfloat16)
    artifact = rewriter.export(attention)(x, x, x)
    (found,) = artifact.manifest["kernels"]
    assert found["op"] == "attention"
    assert found["sites"] == 1
    by_platform = found["by_platform"]
    assert by_platform["tpu"] == "mosaic_tpu"
    assert by_platform["cpu"] == "memory_bounded"
    assert artifact.manifest["custom_calls"] == ["tpu_custom_call"]
    plain = rewriter.export(attention, platforms=("cpu", "cuda"))(x, x, x)
    assert plain.manifest["custom_calls"] == []
