"""The engine's table of contents: `PASSES`, from a jaxpr to the rewritten jaxpr.

Each entry has the name of a pass, its step, and when it runs. `rewriting` runs them.
"""

from __future__ import annotations

from rewriter.program import fold
from rewriter.program.prepare import slices_before_loops, whole_products
from rewriter.rewrite.passes import (
    activations,
    aligned_products,
    erfc_in_16_bits,
    quantized_rows,
    recompute,
    recompute_activations,
)
from rewriter.run import steps
from rewriter.run.program import Pass
from rewriter.run.steps import beside_sites

SPLIT = frozenset({"dynamic_slice", "shard_map"})
"""Primitives that read parts of masks."""

PREPARE = (
    # Prepare: programs that compute the same get the same equations.
    Pass(
        "platform_branches",
        steps.take_platform_branches,
        lambda p: "cond" in p.primitives,
    ),
    Pass("sieve", steps.keep_possible_patterns),
    Pass("equal_constants", steps.merge_equal_constants, lambda p: bool(p.patterns)),
    Pass(
        "masks_in_branches",
        steps.select_masks_of_branches,
        lambda p: bool(p.patterns) and "cond" in p.primitives,
        optional=True,
    ),
    Pass(
        "masks_in_loops",
        steps.compute_masks_in_loops,
        lambda p: bool(p.patterns) and "scan" in p.primitives,
        optional=True,
    ),
    Pass(
        "slices_before_loops",
        steps.take_slices_out_of_loops,
        lambda p: (
            bool(p.patterns)
            and "dynamic_slice" in p.primitives
            and not p.primitives.isdisjoint(slices_before_loops.LOOPS)
        ),
        optional=True,
    ),
    Pass(
        "masks_in_shards",
        steps.make_masks_in_shards,
        lambda p: bool(p.patterns) and not p.primitives.isdisjoint(SPLIT),
        optional=True,
    ),
    Pass(
        "joined_losses",
        steps.join_terms_of_losses,
        lambda p: p.has_losses and not p.strict,
        optional=True,
    ),
    Pass(
        "differences_of_softmaxes",
        steps.multiply_softmaxes,
        lambda p: bool(p.patterns) and {"dot_general", "exp"} <= p.primitives,
        optional=True,
    ),
    Pass(
        "sums_of_cotangents",
        steps.sum_each_cotangent,
        lambda p: bool(p.patterns) and {"exp", "add_any"} <= p.primitives,
        optional=True,
    ),
    Pass("sums_of_rows", steps.sum_rows_first, lambda p: p.has_losses),
    Pass(
        "whole_products",
        steps.multiply_whole_matrices,
        lambda p: (
            bool(p.patterns)
            and "dot_general" in p.primitives
            and not p.primitives.isdisjoint(whole_products.PARTS)
        ),
        optional=True,
    ),
)
"""The passes before the search for sites."""

FOLD = Pass(
    "fold",
    steps.leave_out_equal_layers,
    lambda p: (
        p.folded is None and not p.spread and len(p.closed_jaxpr.eqns) >= fold.WORTH
    ),
    optional=True,
)
"""Runs before `PREPARE` already, if none of those passes changes what is left."""

PASSES = (
    *PREPARE,
    # Find: which ops does the program compute, and where are their gradients?
    FOLD,
    Pass("graph", steps.make_graph),
    Pass("match", steps.find_sites),
    Pass("special_forms", steps.prefer_special_forms, lambda p: p.has_special_forms),
    Pass(
        "composites",
        steps.choose_composites,
        lambda p: any(m.op.parts for m in p.matches),
    ),
    Pass("gradients", steps.find_gradients, optional=True),
    Pass("shards", steps.split_over_devices, lambda p: p.spread),
    # Choose and replace: a kernel for each site, and the site in the program.
    Pass("choose", steps.choose_kernels),
    Pass("replace", steps.replace_sites),
    Pass("remember", steps.remember_pairs, lambda p: p.compared),
    Pass("unfold", steps.write_equal_layers, lambda p: p.folded is not None),
    # Improve what is around the sites.
    Pass(
        "checkpoint_savings",
        steps.save_in_checkpoints,
        lambda p: p.replaced or p.config.checkpoint_memory > 0,
        optional=True,
    ),
    beside_sites(
        quantized_rows.PASS,
        lambda p: p.primitives >= quantized_rows.WANTED and not (p.spread or p.strict),
    ),
    Pass(
        "residual_adds",
        steps.add_residuals_in_kernels,
        lambda p: p.changed,
        optional=True,
    ),
    Pass(
        "gradients_with_results",
        steps.compute_gradients_with_results,
        lambda p: p.changed,
        optional=True,
    ),
    Pass(
        "memory_order",
        steps.pass_transposed_operands,
        lambda p: p.changed,
        optional=True,
    ),
    Pass("checkpoint_policies", steps.keep_checkpoint_policies, lambda p: p.replaced),
    beside_sites(recompute.PASS, lambda p: p.replaced),
    beside_sites(recompute_activations.PASS, lambda p: p.replaced),
    beside_sites(
        activations.PASS,
        lambda p: (
            bool(activations.WANTED & p.primitives) and not (p.spread or p.strict)
        ),
        alone=True,
    ),
    beside_sites(erfc_in_16_bits.PASS, lambda p: p.replaced and not p.strict),
    Pass(
        "packed_operands",
        steps.pass_packed_operands,
        lambda p: p.changed,
        optional=True,
    ),
    beside_sites(
        aligned_products.PASS, lambda p: not (p.spread or p.strict), alone=True
    ),
)
"""The passes in the order in which they run."""
