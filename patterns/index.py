"""The index of patterns: each one's module, its attribute, and what it finds.

A pattern is loaded when its name is first looked up. A new pattern is one entry here.
The order is the one in which patterns are tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shipped:
    """A pattern of the package.

    Attributes:
        module: Its module below ``rewriter.patterns``.
        about: What it finds, in one line.
        attribute: Its name in the module.
    """

    module: str
    about: str
    attribute: str = "PATTERN"


LOOK_ALIKES = "look_alikes"
"""The module with words about operations that no pattern finds."""

COUNTED = (
    "attention", "layer_norm", "rms_norm", "group_norm", "gated_linear_unit",
    "ragged_dot", "linear_cross_entropy", "cross_entropy", "embedding",
)  # fmt: skip
"""What a report counts even where there is none. Forms count as their general op, and
composites as their parts."""

PATTERNS = {
    "attention": Shipped(
        "attention.read", "Attention, in any spelling: softmax(q kᵀ · scale + ...) v."
    ),
    "scored_attention": Shipped(
        "attention.functions.softmax",
        "Attention by any function of its scores, with a softmax or without.",
    ),
    "paged_attention": Shipped(
        "attention.paged", "Attention to keys and values that lie in pages of a pool."
    ),
    "quantized_attention": Shipped(
        "attention.stored", "Attention to keys and values of 4 or 8 bits with scales."
    ),
    "latent_attention": Shipped(
        "attention.latent",
        "Attention whose values are the first columns of keys that all heads share.",
    ),
    "expanded_latent_attention": Shipped(
        "attention.expanded_latent",
        "Attention of few queries whose keys and values are products of a latent.",
    ),
    "paged_latent_attention": Shipped(
        "attention.paged_latent", "Latent attention to a cache in pages of a pool."
    ),
    "layer_norm": Shipped(
        "norms.read", "Layer norm: (x - mean x) / sqrt(var x + eps) * scale + bias."
    ),
    "group_norm": Shipped(
        "norms.read",
        "Group norm: (x - mean x) / sqrt(var x + eps) * scale + bias of groups.",
        "GROUP_NORM",
    ),
    "rms_norm": Shipped(
        "norms.read", "RMS norm: x / sqrt(mean x² + eps) * scale.", "RMS_NORM"
    ),
    "gated_linear_unit": Shipped(
        "gated_linear_unit.read", "Gated linear unit: act(x w_gate) * (x w_up)."
    ),
    "quantized_gated_linear_unit": Shipped(
        "gated_linear_unit.stored",
        "Gated linear unit with matrices of 4 or 8 bits and scales.",
    ),
    "ragged_dot": Shipped(
        "ragged.dot", "Ragged dot: each group of rows times its own matrix."
    ),
    "quantized_ragged_dot": Shipped(
        "ragged.dot", "Ragged dot of 8-bit matrices with scales.", "STORED"
    ),
    "ragged_gated_linear_unit": Shipped(
        "ragged.gated_linear_unit", "Gated linear unit of experts, of ragged dots."
    ),
    "quantized_ragged_gated_linear_unit": Shipped(
        "ragged.gated_linear_unit",
        "Gated linear unit of experts with 8-bit matrices.",
        "STORED",
    ),
    "quantized_dot": Shipped(
        "quantized.dot", "Rows times a matrix of 4 or 8 bits with scales."
    ),
    "packed_dot": Shipped(
        "quantized.packed",
        "Rows times a matrix of 4-bit numbers packed in bytes or words.",
    ),
    "block_scaled_dot": Shipped(
        "quantized.by_blocks",
        "Rows times a matrix of 4 or 8 bits, part by part with scales of blocks.",
    ),
    "linear_cross_entropy": Shipped(
        "cross_entropy.read",
        "The loss over a vocabulary: log Σ exp y - y[label], y = x w + bias.",
    ),
    "cross_entropy": Shipped(
        "cross_entropy.read",
        "The loss of given logits y: log Σ exp y - y[label].",
        "GIVEN_LOGITS",
    ),
    "embedding": Shipped(
        "embedding.read", "Rows added to a table by ids: the gradient of a lookup."
    ),
    "embedding_lookup": Shipped(
        "embedding.read", "A lookup, on GPUs, for the sake of its gradient.", "LOOKUPS"
    ),
}
