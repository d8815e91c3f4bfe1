"""Measurements of one Hopper GPU serve the others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.measure.family import HOPPER, carried_over
from rewriter.measure.key import Key
from rewriter.measure.measurement import SIMULATED, Measurement
from rewriter.measure.sources import shipped
from rewriter.measure.tuned import Tuned
from rewriter.site.implementation import Implementation

pytestmark = pytest.mark.once

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
SHAPES = (("x", (8192, 4096)), ("scale", (4096,)))
TYPES = (("x", "bfloat16"), ("scale", "bfloat16"))
KEY = Key("rms_norm", "forward", SHAPES, TYPES, (), H200)
READING = 1e6 * 2 * 8193 * 4096 / 4.8e12


def measured(us: float, **more: object) -> Measurement:
    one = Measurement(Implementation("hopper"), "hopper 1", "0.11.2", us, 0.1, 20)
    return dataclasses.replace(one, **{"method": "cupti", **more})


def carried(kind: str, *found: Measurement) -> list[Measurement]:
    entries = list(carried_over([(KEY, found)], kind))
    assert all(key == dataclasses.replace(KEY, device=kind) for key, _ in entries)
    return [m for _, ms in entries for m in ms]


def test_times_by_memory_and_by_products() -> None:
    by_memory, by_products = measured(1.5 * READING), measured(20 * READING)
    one, other = carried(H100, by_memory, by_products)
    assert one.median_us == pytest.approx(1.5 * READING * 4.8 / 3.35)
    assert one.sigma_us == pytest.approx(0.1 * 4.8 / 3.35)
    assert other.median_us == pytest.approx(20 * READING)
    assert one.note == "measured on NVIDIA H200"
    (slow,) = carried("NVIDIA H20", by_products)
    assert slow.median_us == pytest.approx(20 * READING * 989 / 148)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "TPU v4", ""])
def test_other_chips_get_none(kind: str) -> None:
    assert not carried(kind, measured(100.0))


def test_what_is_not_carried_over() -> None:
    config = (("programs", 132),)
    wide = measured(9.0, implementation=Implementation("hopper", config=config))
    failed = measured(9.0, median_us=None, problem="no room")
    guessed = measured(9.0, method=SIMULATED)
    assert not carried(H200, measured(9.0))
    assert len(carried("NVIDIA H800", wide, failed, guessed)) == 1
    assert not carried("NVIDIA H100 PCIe", wide, failed, guessed)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.1
    weights = jax.nn.softmax(scores.astype("float32")).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def test_what_the_package_ships_serves_the_family() -> None:
    assert {key.device for key, _ in shipped("attention").entries} & {H200}
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), "bfloat16")
    sites = {}
    for target in ("h200", "h100"):
        (sites[target],) = rewriter.explain(attention, target=target)(x, x, x).sites
    assert sites["h200"].origin == sites["h100"].origin == "shipped"
    assert sites["h100"].kernel == sites["h200"].kernel == "hopper"


def test_the_nearest_relative_serves() -> None:
    on_h100 = dataclasses.replace(KEY, device=H100)
    entries = [(on_h100, (measured(70.0),)), (KEY, (measured(50.0),))]
    for kind, us in (("NVIDIA H800", 70.0), ("NVIDIA GH200 144G", 50.0)):
        for given in (entries, entries[::-1]):
            ((key, (one,)),) = carried_over(given, kind)
            assert key.device == kind
            assert one.median_us == pytest.approx(us, 0.05)


def test_own_measurements_come_first() -> None:
    (key,) = (k for k, _ in shipped("attention").entries if k.shapes[0][1] == (4, 4096, 16, 128) and k.passes == "forward" and dict(k.params)["window"] == (None, None) and dict(k.dtypes)["q"] == "bfloat16" and len(k.shapes) == 3 and k.device == H200)  # fmt: skip  # noqa: E501
    slow = measured(9000.0, implementation=Implementation("hopper"))
    fast = measured(10.0, implementation=Implementation("memory_bounded"),
                    version="memory_bounded 1")  # fmt: skip
    tuned = Tuned(((dataclasses.replace(key, device=H100), (slow, fast)),))
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), "bfloat16")
    with tuned:
        (site,) = rewriter.explain(attention, target="h100")(x, x, x).sites
    assert (site.kernel, site.origin) == ("memory_bounded", "tuned")


def test_every_chip_has_rates() -> None:
    for name, rates in HOPPER.items():
        assert rates.processors in (78, 114, 132), name
        assert 1e14 < rates.flops < 1e15
        assert 1e12 < rates.bandwidth < 5e12


def test_files_of_other_chips_are_not_read() -> None:
    """A file is named after its chip."""
    every = shipped("attention").entries
    assert not shipped("attention", "cpu").entries
    for kind in ("NVIDIA H200", "TPU v5 lite", "TPU v4"):
        own = {
            key for key, _ in shipped("attention", kind).entries if key.device == kind
        }
        assert own == {key for key, _ in every if key.device == kind}
        assert own
    relatives = shipped("attention", "NVIDIA H800").entries
    chips = {key.device for key, _ in relatives}
    assert H200 in chips
    assert all(chip.startswith("NVIDIA H") for chip in chips)
