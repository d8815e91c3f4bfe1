"""Losses whose classes the program itself splits over devices, by collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import rewriter

MESH = AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))


def by_hand(x: Any, w: Any, labels: Any) -> Any:
    """As in Megatron: a maximum and two sums of numbers of rows are moved."""
    y, size = x @ w, w.shape[1]
    top = lax.pmax(lax.stop_gradient(y.max(-1)), "model")
    total = lax.psum(jnp.exp(y - top[:, None]).sum(-1), "model")
    own = labels - lax.axis_index("model") * size
    inside = (own >= 0) & (own < size)
    place = jnp.clip(own, 0, size - 1)[:, None]
    picked = jnp.take_along_axis(y, place, -1)[:, 0]
    picked = lax.psum(jnp.where(inside, picked, 0), "model")
    return jnp.log(total) + top - picked


@pytest.mark.parametrize("differentiated", [False, True])
def test_it_is_left_as_written_and_named(differentiated: bool) -> None:
    specs = P(), P(None, "model"), P()
    split = jax.shard_map(by_hand, mesh=MESH, in_specs=specs, out_specs=P())
    mean = lambda *given: split(*given).mean()
    fn = jax.value_and_grad(mean, (0, 1)) if differentiated else mean
    floats = [jax.ShapeDtypeStruct(s, "float32") for s in ((32, 16), (16, 1024))]
    labels = jax.ShapeDtypeStruct((32,), "int32")
    report = rewriter.explain(fn)(*floats, labels)
    assert not [s for s in report.sites if "cross" in s.op]
    (miss,) = report.misses
    assert miss.op == "linear_cross_entropy"
    assert "by collectives of its own" in miss.reasons[0].text
    assert "split the weights by their sharding" in str(report)
