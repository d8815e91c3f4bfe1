"""Devices by name, and the one that is attached."""

from __future__ import annotations

import pytest

import rewriter
from rewriter.ops import device


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia-h200"])
def test_named(name):
    found = device.named(name)
    assert (found.kind, found.platform, found.measured) == ("NVIDIA H200", "cuda", True)
    assert found.flops == 840e12


def test_every_kind_is_found_by_both_names():
    for short, known in device.KNOWN.items():
        assert device.named(short) is known
        assert device.named(known.kind) is known


def test_unknown_name_says_which_there_are():
    with pytest.raises(rewriter.ConfigError, match="Did you mean 'h200'") as caught:
        device.named("h20")
    assert "tpu_v5p" in str(caught.value)
    assert "test_device.py" in caught.value.where


def test_attached_kind_without_figures():
    unknown = device._attached("gpu", "NVIDIA of next year")
    assert (unknown.platform, unknown.flops, unknown.bandwidth) == ("cuda", 0, 0)
    assert device._attached("gpu", "NVIDIA H200") is device.KNOWN["h200"]
