"""Why a kernel is not chosen for a target: the limit, and the use's own numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter.choose.choose import choose
from rewriter.config import Config, explaining, resolve
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry

pytestmark = pytest.mark.once

VAGUE = (
    "not detected",
    "not tried",
    "of this size",
    "traces cuDNN only",
    "does not fit",
)


def use(op: str, params: Any = None, dtype: Any = jnp.bfloat16, **shapes: Any) -> Spec:
    kinds = {"group_sizes": jnp.int32, "mask": bool, "table": jnp.int32}
    kinds |= {"kv_lengths": jnp.int32}
    structs = {
        n: jax.ShapeDtypeStruct(s, kinds.get(n, dtype)) for n, s in shapes.items()
    }
    return spec_of(registry().op(op), structs, params or {})


def attention(t: int, s: int, h: int = 64, e: int = 0, **more: Any) -> Spec:
    heads = {"q": (2, t, 4, h), "k": (2, s, 4, h), "v": (2, s, 4, e or h)}
    tables = {n: more.pop(n) for n in ("mask", "kv_lengths") if n in more}
    return use("attention", more, jnp.bfloat16, **heads, **tables)


def paged(count: int) -> Spec:
    pools = dict.fromkeys(("k_pages", "v_pages"), (256, 16, 4, 128))
    shapes = {"q": (2, 1, 4, 128), **pools, "table": (2, count), "kv_lengths": (2,)}
    return use("paged_attention", None, jnp.bfloat16, **shapes)


MASKED = attention(512, 1 << 14, mask=(2, 1, 512, 1 << 14))
LENGTHS = attention(256, 256, window=(8, 0), kv_lengths=(2,))
NORM = {"x": (64, 512), "scale": (512,)}
UNIT = {"x": (64, 128), "w": (4, 128, 256), "group_sizes": (4,)}

TOLD = [
    ("h100", attention(256, 300, 512), 0, "cudnn", "a multiple of 8 up to 256"),
    ("a100", attention(256, 300, 192), 0, "cudnn", "a multiple of 8 up to 128"),
    ("h100", attention(256, 300, 192, 128), 0, "cudnn", "128 wide, and those of q 192"),
    ("h100", MASKED, 0, "cudnn", "not compared with mask on a GPU"),
    ("h100", LENGTHS, 0, "cudnn", "lengths of keys and a window of 8 keys"),
    ("h100", attention(256, 256, window=(4, 3)), 0, "cudnn", "not 3 keys after it"),
    ("h100", attention(256, 256, window=(4, None)), 0, "cudnn", "not nowhere"),
    ("h100", attention(256, 16, window=(4, 0)), 0, "cudnn", "4 keys before each of"),
    ("h100", attention(96, 96), 0, "hopper", "0.281 MiB: not measured below 0.5 MiB"),
    ("h100", attention(1, 256), 0, "hopper_decode", "not measured below 16 MiB"),
    ("h100", attention(1, 1 << 16), 1, "hopper_decode", "no gradients of its own"),
    ("a100", attention(256, 256), 0, "hopper", "A100-SXM4-80GB is not a Hopper GPU"),
    ("h100", attention(1 << 18, 1 << 18), 0, "xla", "80% of the 80 GiB of NVIDIA H100"),
    ("h100", paged(32), 0, "hopper_decode", "MiB to read: not measured below 16 MiB"),
    ("h100", paged(32), 0, "gathered", "as the program does, which is no faster"),
    ("h100", use("rms_norm", **NORM), 0, "hopper",
     "rows of 512 and 0.0625 MiB: measured for rows of 384 to 16384 and 6 MiB"),
    ("h100", use("ragged_gated_linear_unit", {"halves": "gate_up"}, **UNIT), 1,
     "hopper", "gradients read the branches"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "spec", "count", "name", "why"), TOLD)
def test_the_limit_is_told(
    target: str, spec: Spec, count: int, name: str, why: str
) -> None:
    told = dict(described(spec, target, count).not_chosen)
    assert why in told[name], told
    for text in told.values():
        assert not any(vague in text for vague in VAGUE), text


def described(spec: Spec, target: str, count: int = 0) -> Any:
    """The choice that is described: by models alone, without measurements."""
    with explaining():
        config = resolve({"tune": "off"})
    kernels = registry().kernels(spec.op)
    return choose(spec, config, kernels, device.named(target), count)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_one_that_is_traced_here_asks_jax() -> None:
    spec, kernels = attention(256, 256), registry().kernels("attention")
    choice = choose(spec, Config(tune="off"), kernels, device.named("h100"))
    assert "this machine, which has no cuDNN" in dict(choice.not_chosen)["cudnn"]


def test_symbolic_sizes_of_a_known_gpu() -> None:
    """The report does not say that the GPU were unknown."""
    (b,) = jax.export.symbolic_shape("b")
    spec = use("attention", **dict.fromkeys("qkv", (b, 256, 4, 64)))
    told = dict(described(spec, "h100").not_chosen)
    assert told["hopper"] == (
        "chosen by its estimate alone, for a known Hopper GPU and known sizes"
    )
