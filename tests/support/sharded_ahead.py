"""Run by test_sharding.py: sharded programs compiled for devices that are not there.

``python -m tests.support.sharded_ahead tpu v5e:2x4 [OP]`` or ``cuda 1x1x8`` (with the
text of a GpuTargetConfigProto in the file that ``GPU_TARGET`` names).
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.program.collectives import collectives_in
from tests.support.sharded_programs import attention, ragged_dot, received, train_step


def mesh_of(platform: str, name: str) -> Mesh:
    """Eight devices that are described, 4 × 2."""
    if platform == "tpu":
        devices = ahead_of_time.topology(name)
    else:
        with open(os.environ["GPU_TARGET"], encoding="utf-8") as file:
            target = file.read()
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=name
        ).devices
    return Mesh(np.array(devices[:8]).reshape(4, 2), ("data", "model"))


# ------------------------------------------------------------ a kernel of a user
@rewriter.pattern(dims="x: b t d, w: d -> b t d", name="user_norm")
def user_norm(x: Any, w: Any) -> jax.Array:
    """RMSNorm with a user's kernel."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


@user_norm.kernel(platform=("tpu", "cuda"), version=1)
def by_pallas(x: Any, w: Any) -> jax.Array:
    """One block for each row of the batch."""

    def body(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        x = x_ref[0]
        scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        out_ref[0] = x * scale * w_ref[...]

    rows = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0))
    return pl.pallas_call(
        body,
        grid=x.shape[:1],
        in_specs=[rows, pl.BlockSpec((1, w.shape[0]), lambda i: (0, 0))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, w[None])


def normed(x: Any, w: Any) -> jax.Array:
    """A program with the pattern in it."""
    y = jnp.sin(x)
    return y * w * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def struct(shape: Any, spec: Any, mesh: Mesh, dtype: Any = jnp.bfloat16) -> Any:
    """An array on the mesh, described."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(f: Any, platform: str, *args: Any) -> str:
    """The program of one device."""
    traced = f.trace(*args)
    return traced.lower(lowering_platforms=(platform,)).compile().as_text()


def main(platform: str, name: str, only: str = "") -> None:
    """Compiles programs as written and rewritten; kernels in, no collectives more."""
    mesh = mesh_of(platform, name)
    kind = "tpu_v5e" if platform == "tpu" else "h200"
    call = "tpu_custom_call" if platform == "tpu" else "(mosaic_gpu|.*triton)"
    heads = P("data", None, "model")
    q, k = ((8, 2048, n, 128) for n in (16, 8))
    programs = {
        "norm": (normed, [struct((8, 256, 512), P("data"), mesh, jnp.float32),
                          struct((512,), P(), mesh, jnp.float32)]),
        "attention": (attention, [struct(q, heads, mesh), struct(k, heads, mesh),
                                  struct(k, heads, mesh)]),
        "ring": (attention, [struct(x, P(None, "data", "model"), mesh)
                             for x in (q, k, k)]),
        "ragged_dot": (ragged_dot, [
            struct((8192, 1024), P("data"), mesh),
            struct((16, 1024, 2048), P(None, None, "model"), mesh),
            struct((16,), P(), mesh, jnp.int32)]),
    }  # fmt: skip
    fused = "hopper" if platform == "cuda" else "mosaic_tpu"
    forced = {"attention": fused, "ragged_dot": fused, "user_norm": "by_pallas"}
    for label, (f, args) in programs.items():
        if only not in label:
            continue
        for passes in (f, train_step(f)):
            kernels = forced | ({"attention": "ring"} if label == "ring" else {})
            fast = rewriter.optimize(
                passes, target=kind, implementation=kernels,
                patterns=["default,-rms_norm", user_norm],
            )  # fmt: skip
            after = compiled(fast, platform, *args)
            before = compiled(jax.jit(passes), platform, *args)
            calls = len(re.findall(rf'custom_call_target="{call}', after))
            gains = collectives_in(before), collectives_in(after)
            print(label, passes.__name__, f"{calls} kernels", *gains, flush=True)
            passed = {"collective-permute"} if label == "ring" else set()
            assert set(gains[1]) <= set(gains[0]) | passed, gains
            moved = [received(found) for found in gains]
            # XLA for GPUs gathers all tokens and computes whole gradients of experts on
            # every device; parts of tokens give parts of those, and a larger sum here.
            gathered = platform == "cuda" and label == "ragged_dot" and passes is not f
            assert moved[1] <= (1.15 if gathered else 1) * moved[0], gains
            site = fast.report(*args).sites[0]
            print("  ", site.op, site.kernel, site.sharding, site.not_chosen)
            assert site.sharding, site
            assert calls


if __name__ == "__main__":
    main(*sys.argv[1:])
