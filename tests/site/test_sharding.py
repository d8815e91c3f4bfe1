"""Sharded programs: on eight devices in a process of their own, and by letters."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.ops.kernel import Spec
from rewriter.ops.registry import registry
from rewriter.program.propagation import split_by
from rewriter.site.shards import NoShards, Shards, local_spec, shards_of
from tests import slow
from tests.support.kernels import tpu
from tests.support.sharded_programs import attention

ROOT = pathlib.Path(__file__).parents[2]
MESH = AbstractMesh((4, 2, 1), ("data", "model", "one"))


def started(script: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    """A script in a process of its own."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{script}", *options],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What a process printed that has to end well."""
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def devices(count: int) -> str:
    """Flags for so many virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}"


@pytest.mark.parametrize(
    "command",
    slow.first(
        15,
        [
            ("mesh_grid", "11"),
            pytest.param(("mesh_grid", "1", "auto_axes"), marks=pytest.mark.once),
            ("mixed_meshes", "101"),
            pytest.param(("mixed_meshes", "7"), marks=pytest.mark.once),
            ("sharded_calls",),
            pytest.param(("sharded_masks",), marks=pytest.mark.once),
            pytest.param(("sharded_mask_parts",), marks=pytest.mark.once),
            pytest.param(("sharded_rows",), marks=pytest.mark.once),
            pytest.param(("sharded_losses", "--brief"), marks=pytest.mark.once),
            pytest.param(("sharded_quantized",), marks=pytest.mark.once),
            pytest.param(("sharded_precision",), marks=pytest.mark.once),
            pytest.param(("sharded_scored",), marks=pytest.mark.once),
            pytest.param(("sharded_experts",), marks=pytest.mark.once),
            pytest.param(("sharded_ring",), marks=pytest.mark.once),
            pytest.param(("sharded_streams",), marks=pytest.mark.once),
            pytest.param(("sharded_programs", "--brief"), marks=pytest.mark.once),
            ("sharded_programs", "--only", "attention"),
            ("mesh_grid",),
        ],
    ),
    ids=[
        "some of the grid",
        "auto axes",
        "some meshes of several kinds",
        "meshes of several kinds",
        "calls",
        "masks",
        "parts of masks",
        "rows",
        "losses",
        "matrices of few bits",
        "precisions",
        "functions of scores",
        "experts",
        "ring",
        "streams",
        "programs",
        "programs of attention",
        "the grid",
    ],
)
def test_on_eight_devices(command: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    ended(started(*command, XLA_FLAGS=devices(8), REWRITER_CACHE_DIR=str(tmp_path)))


def test_two_hosts_make_one_program(tmp_path: pathlib.Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    hosts = [
        started(
            "sharded_hosts", port, host,
            XLA_FLAGS=devices(4), REWRITER_CACHE_DIR=str(tmp_path / host),
        )
        for host in "01"
    ]  # fmt: skip
    digests = {ended(host).split("digest ")[1] for host in hosts}
    assert len(digests) == 1


@tpu.needs_compiler
def test_compiled_for_eight_chips_that_are_not_there() -> None:
    said = ended(started("sharded_ahead", "tpu", "v5e:2x4", "norm"))
    assert said.count("user_norm by_pallas b over data") == 2


@pytest.mark.slow
@tpu.needs_compiler
def test_a_ring_of_chips_that_are_not_there() -> None:
    said = ended(started("sharded_ahead", "tpu", "v5e:2x4", "ring"))
    assert said.count("attention ring of mosaic_tpu t over data") == 2


SHAPES = {
    "attention": {
        "q": (8, 64, 4, 16), "k": (8, 32, 2, 16), "v": (8, 32, 2, 16),
        "bias": (1, 4, 64, 32), "sinks": (4,), "out": (8, 64, 4, 16),
    },
    "rms_norm": {"x": (8, 64, 32), "scale": (32,), "out": (8, 64, 32)},
    "gated_linear_unit": {
        "x": (8, 64, 32), "w_gate": (32, 128), "w_up": (32, 128), "out": (8, 64, 128),
    },
    "ragged_dot": {
        "lhs": (64, 32), "rhs": (8, 32, 16), "group_sizes": (8,), "out": (64, 16),
    },
    "linear_cross_entropy": {
        "x": (8, 64, 16), "w": (16, 512), "labels": (8, 64), "bias": (512,),
        "out": (8, 64),
    },
}  # fmt: skip


INTEGERS = ("group_sizes", "labels")


def spread(name: str, params: Mapping[str, Any] | None = None, **specs: Any) -> Shards:
    """How an op is spread with operands split as given; ``shapes`` changes some."""
    shapes = {**SHAPES[name], **specs.pop("shapes", {})}
    op = registry().op(name)
    splits = {n: split_by(specs.get(n, P()), len(s)) for n, s in shapes.items()}
    return shards_of(op, {**op.defaults, **(params or {})}, shapes, splits, MESH)


def test_heads_take_all_that_has_heads_with_them() -> None:
    found = spread("attention", q=P("data", None, "model"))
    assert dict(found.specs) == {
        "q": P("data", None, "model", None), "k": P("data", None, "model", None),
        "v": P("data", None, "model", None), "bias": P(None, "model", None, None),
        "sinks": P("model"),
    }  # fmt: skip
    assert found.out == P("data", None, "model", None)
    assert found.text == "b over data, n over model, k over model"


def test_one_key_head_is_read_by_all() -> None:
    one = dict.fromkeys(("k", "v"), (8, 32, 1, 16))
    found = spread("attention", q=P(None, None, "data"), shapes=one)
    assert dict(found.specs)["k"] == P(None, None, None, None)


def test_an_axis_of_the_mesh_with_one_device_splits_nothing() -> None:
    assert spread("attention", q=P(None, None, None, "one")).text == "replicated"


@pytest.mark.parametrize(
    ("name", "specs", "why"),
    [
        ("attention", {"q": P(None, None, "data")}, "axis k of 2 cannot be split into"),
        ("attention", {"k": P(None, "data")}, "k is split along s over data"),
        ("attention", {"out": P(None, None, None, "data")}, "the result is split alon"),
        ("rms_norm", {"x": P(None, None, "model")}, "x is split along d over model"),
        ("gated_linear_unit", {"w_up": P("model")}, "w_up is split along k over model"),
        ("ragged_dot", {"lhs": P(("data", "model")), "shapes": {"lhs": (60, 32),
         "out": (60, 16)}}, "axis m of 60 cannot be split into 8"),
        ("linear_cross_entropy", {"w": P("model")}, "w is split along k over model"),
        ("linear_cross_entropy", {"w": P(None, "data"), "shapes": {"w": (16, 510),
         "bias": (510,)}}, "axis v of 510 cannot be split into 4"),
    ],
)  # fmt: skip
def test_refused(name: str, specs: Any, why: str) -> None:
    with pytest.raises(NoShards, match=why):
        spread(name, **specs)


def test_what_a_busy_axis_splits_otherwise_is_gathered() -> None:
    found = spread(
        "gated_linear_unit", x=P("data"), w_gate=P("data", "model"), w_up=P("data")
    )
    assert dict(found.specs)["w_gate"] == P(None, "model")
    assert found.gathered == (("w_gate", ("data",)), ("w_up", ("data",)))
    assert found.kept == (("w_gate", P("data", "model")), ("w_up", P("data", None)))
    assert found.text.endswith("f over model; w_gate, w_up gathered over data")


def test_keys_that_are_split_as_queries_are_may_go_around() -> None:
    around = spread("attention", q=P("data"), k=P("data"), v=P("data")).around
    assert around is None
    rows = dict.fromkeys("qkv", P("model", "data"))
    found = spread("attention", **rows)
    assert found.text == "b over model, t over data; k, v gathered over data"
    assert found.around is not None
    assert found.around.text == "b over model, t over data; k, v passed around data"
    assert dict(found.around.specs)["k"] == P("model", "data", None, None)
    assert not found.around.gathered
    assert spread("attention", **{**rows, "v": P("model")}).around is None
    short = dict.fromkeys("kv", (8, 30, 2, 16))
    assert spread("attention", **rows, shapes=short).around is None
    assert spread("rms_norm", x=P("data")).around is None


@pytest.mark.parametrize(
    ("mode", "specs", "letters", "summed"),
    [
        ("forward", {"lhs": P("data", "model")}, {"m", "k"}, ("model",)),
        ("forward", {"rhs": P("data", None, "model")}, {"g", "n"}, ("data",)),
        ("contracting", {"lhs": P("data"), "rhs": P("data", "model"), "shapes": {
            "rhs": (64, 16), "out": (8, 32, 16)}}, {"m", "n"}, ("data",)),
        ("transposed", {"lhs": P(None, "model"), "shapes": {
            "rhs": (8, 16, 32)}}, {"k"}, ("model",)),
    ],
)  # fmt: skip
def test_ragged_dots_sum_over_parts(
    mode: str, specs: Any, letters: set[str], summed: tuple[str, ...]
) -> None:
    found = spread("ragged_dot", {"mode": mode}, **specs)
    assert {letter for letter, _ in found.letters} == letters
    assert found.summed == summed


def test_classes_of_a_loss_may_be_split() -> None:
    found = spread("linear_cross_entropy", x=P("data"), w=P("data", "model"))
    assert found.text == "...2 over data, v over model; w gathered over data"
    assert dict(found.specs)["bias"] == P("model")
    assert found.out == P("data", None)
    assert not found.summed
    spec = seen("linear_cross_entropy", found, outside="nan", z_loss=0.1)
    assert spec.shape("w") == (16, 256)
    assert spec.param("reduced")
    assert not spec.has("first")  # kernels are chosen without
    assert not spec.param("z_loss")


def test_the_smaller_of_rows_and_classes_is_gathered() -> None:
    both = {"x": P("data"), "labels": P("data"), "w": P(None, "data")}
    found = spread("linear_cross_entropy", **both)
    assert found.text == "...2 over data; w gathered over data"
    few = {"x": (8, 16, 16), "labels": (8, 16), "out": (8, 16)}
    found = spread("linear_cross_entropy", **both, shapes=few)
    assert found.text == "v over data; x, labels gathered over data"


def seen(name: str, found: Shards, **params: Any) -> Spec:
    """What one device sees."""
    op = registry().op(name)
    structs = {
        n: jax.ShapeDtypeStruct(s, jnp.int32 if n in INTEGERS else jnp.bfloat16)
        for n, s in SHAPES[name].items()
        if n != "out"
    }
    return local_spec(op, found, structs, {**op.defaults, **params})


def test_kernels_are_chosen_for_one_device() -> None:
    found = spread("attention", q=P("data", "model"))
    spec = seen("attention", found, window=(None, 0))
    assert spec.shape("q") == (2, 32, 4, 16)
    assert spec.shape("bias") == (1, 4, 32, 32)
    assert spec.shape("offset") == (1,)  # which the mask reads
    assert not seen("attention", found).has("offset")
    rows = spread("attention", **dict.fromkeys("qkv", P(None, "data"))).around
    assert rows is not None
    part = seen("attention", rows, window=(None, 0))
    assert part.shape("k") == (8, 8, 2, 16)
    assert not part.has("offset")  # a ring knows of positions
    experts = spread("ragged_dot", rhs=P("data"))
    assert seen("ragged_dot", experts).shape("group_sizes") == (2,)


# ---------------------------------------------------------------- several GPUs
@pytest.mark.gpu
@pytest.mark.parametrize("parts", [(2, 1), (1, 2)], ids=["data", "model"])
@pytest.mark.parametrize("kernel", ["cudnn", "hopper", "memory_bounded"])
def test_a_step_on_two_gpus(parts: tuple[int, int], kernel: str) -> None:
    """A block's gradients, its heads or its rows on two GPUs, are the original's."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh(parts, ("data", "model"), (AxisType.Auto,) * 2)

    def block(weights: Any, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        y = y.astype(x.dtype) * weights["scale"]
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w) for w in weights["qkv"])
        return x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), weights["out"])

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return (block(weights, block(weights, x)).astype(jnp.float32) ** 2).mean()

    def drawn(seed: int, shape: tuple[int, ...], spec: P, size: float) -> jax.Array:
        x = size * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return jax.device_put(x, NamedSharding(mesh, spec))

    heads = [drawn(i, (1024, 8, 128), P(None, "model"), 0.03) for i in range(3)]
    weights = {
        "qkv": heads, "out": drawn(3, (8, 128, 1024), P("model"), 0.03),
        "scale": drawn(4, (1024,), P(), 1.0),
    }  # fmt: skip
    x = drawn(5, (4, 2048, 1024), P("data"), 1.0)
    step = jax.value_and_grad(loss)
    fast = rewriter.optimize(step, implementation={"attention": kernel})
    (site, *_) = [s for s in fast.report(weights, x).sites if s.op == "attention"]
    assert site.kernel == kernel, site
    assert site.sharding, site
    want = jax.jit(step)(weights, x)
    for a, b in zip(
        jax.tree.leaves(fast(weights, x)), jax.tree.leaves(want), strict=True
    ):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
