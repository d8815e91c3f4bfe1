"""Attention as ops: of keys and values in arrays, and in pages."""

from __future__ import annotations

from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.expanded_form import expanded_form
from rewriter.kernels.attention.latent_form import latent_form
from rewriter.kernels.attention.paged_form import paged_form
from rewriter.kernels.attention.paged_latent_form import paged_latent_form
from rewriter.kernels.attention.reference import (
    distributions,
    reference,
    sample,
    usual,
)
from rewriter.kernels.attention.scored_form import scored_form
from rewriter.kernels.attention.sharding import sharding
from rewriter.kernels.attention.stored_form import stored_keys_form
from rewriter.kernels.attention.words import WORDS, has_zero_rows, note
from rewriter.ops.op import Op, Operand

_TABLE = "b|1 n|1 t|1 s|1"

OP = Op(
    name="attention",
    operands=(
        Operand("q", "b t n h", True, "Queries: head i reads key head `i * k // n`."),
        Operand("k", "b s k h", True, "Keys."),
        Operand("v", "b s k e", True, "Values."),
        Operand("bias", _TABLE, doc="Added to the scores after scale and softcap."),
        Operand("mask", _TABLE, doc="bool: True keeps.",
                summary="a boolean mask over keys",
                instead="a mask that is computed from segments, lengths or positions "
                "needs no such array"),
        Operand("q_segments", "b|1 t", doc="int: queries see keys of equal segments."),
        Operand("kv_segments", "b|1 s", doc="int: the keys' segments.",
                summary="keys of the same segment"),
        Operand("kv_lengths", "b|1", doc="int: keys `s < length` are seen.",
                summary="keys up to a length"),
        Operand("offset", "b|1", doc="int: added to the positions of queries.",
                summary="positions at an offset"),
        Operand("prefix", "b|1", doc="int: keys `s < prefix` are seen whatever the "
                "window.", summary="a prefix that all rows see"),
        Operand("kv_positions", "b|1 s", doc="int: the keys' positions, which those of "
                "the next two are compared with; they may be in any order.",
                summary="positions of keys from an array"),
        Operand("first_position", "b|1 t", doc="int: queries see keys at positions "
                "from this one on."),
        Operand("last_position", "b|1 t", doc="int: queries see keys at positions up "
                "to this one."),
        Operand("alibi", "n", doc="`alibi * (s - t - offset - shift)` is added to the "
                "scores."),
        Operand("sinks", "n", doc="`exp(sink)` joins the denominator of each row. A "
                "row without keys is then 0, whatever `empty_rows` says."),
        Operand("dropout", _TABLE, doc="Multiplies the probabilities."),
        Operand("scale_factor", "", doc="Multiplies `scale`, at run time."),
    ),
    out="b t n e",
    reference=reference,
    flat=True,
    sample=sample,
    usual=usual,
    defaults={
        "scale": 1.0, "window": (None, None), "shift": 0, "softcap": None,
        "empty_rows": "nan", "fill": None, "fill_passes": False, "open_bias": False,
        "out_dtype": None,
    },
    parallel="b",
    words=WORDS,
    note=note,
    has_zero_rows=has_zero_rows,
    tiled="h e",
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

PAGED = paged_form(
    OP,
    "paged_attention",
    "attention over keys and values in pages that a table names.",
)

LATENT = latent_form(
    OP,
    "latent_attention",
    "attention to a latent that all heads share: values are the keys' first columns.",
)

EXPANDED = expanded_form(
    OP,
    "expanded_latent_attention",
    "attention to keys and values that two matrices make of a latent.",
)

PAGED_LATENT = paged_latent_form(
    OP,
    "paged_latent_attention",
    "attention to a latent in pages that a table names.",
)

STORED = stored_keys_form(
    OP,
    "quantized_attention",
    "attention to keys and values of few bits with scales.",
)

SCORED = scored_form(
    OP,
    "scored_attention",
    "attention with any function of its scores, as the program computes it.",
)
