"""The passes of the pipeline: each takes a `Program` and returns the next one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr

from rewriter.algebra.custom_rules import proved, users_rules
from rewriter.choose.composite import with_composites
from rewriter.choose.number_sites import Plan
from rewriter.choose.planner import for_platform, planned, target_of
from rewriter.choose.special_form import prefer_special_ops
from rewriter.errors import RewriterError
from rewriter.find.hidden_by_rules import hidden_by_rules
from rewriter.find.match import Match, search
from rewriter.find.region import Regions
from rewriter.find.sieve import possible, primitives
from rewriter.gradients.general_form import with_general_forms
from rewriter.gradients.search import search_gradients
from rewriter.program.bodies import map_bodies
from rewriter.program.equal_constants import once
from rewriter.program.fold import fold
from rewriter.program.graph import Graph
from rewriter.program.lines import is_of_gradient
from rewriter.program.prepare import (
    differences_of_softmaxes,
    masks_in_loops,
    masks_in_shards,
    pairs_of_loops,
    parts_of_softmaxes,
    slices_before_loops,
    sums_of_cotangents,
    sums_of_rows,
    whole_products,
)
from rewriter.program.prepare.joined_losses import join
from rewriter.program.prepare.masks_in_branches import select_masks
from rewriter.program.prepare.platform_branches import take_branches
from rewriter.rewrite import replace as splicing
from rewriter.rewrite.beside_sites import BodyPass
from rewriter.rewrite.locate import located
from rewriter.rewrite.passes.checkpoint_policies import keep_policies
from rewriter.rewrite.passes.checkpoint_savings import save, unspent
from rewriter.rewrite.passes.fuse_residual_adds import fuse_residual_adds
from rewriter.rewrite.passes.gradients_with_results import compute_together
from rewriter.rewrite.passes.joined_gradients import join_gradients
from rewriter.rewrite.passes.memory_order import use_memory_order
from rewriter.rewrite.passes.packed_operands import use_packed_operands
from rewriter.rewrite.passes.shared_parts import use_shared_parts
from rewriter.rewrite.replacements import pairs_of
from rewriter.rewrite.splice import Splice
from rewriter.rewrite.unfold import TurnsDiffer, unfold
from rewriter.run.program import Pass, Program
from rewriter.site.facts import Facts
from rewriter.support.failing import failing
from rewriter.support.verdict import Reason

log = logging.getLogger("rewriter.passes")
Item = TypeVar("Item")


def take_platform_branches(program: Program) -> Program:
    """Takes the only branch that a target can run, where branches are by platform."""
    return replace(program, closed_jaxpr=take_branches(program.closed_jaxpr))


def select_masks_of_branches(program: Program) -> Program:
    """Computes masks in front of what reads them, not in branches that return them."""
    return replace(program, closed_jaxpr=select_masks(program.closed_jaxpr))


def keep_possible_patterns(program: Program) -> Program:
    """Leaves out patterns that cannot occur, by the program's primitives."""
    names = program.primitives
    if program.closed_jaxpr is not program.original:
        names = frozenset(primitives(program.closed_jaxpr))
    found = possible(program.closed_jaxpr, program.patterns, names)
    return replace(program, patterns=tuple(for_platform(found, program.config)))


def merge_equal_constants(program: Program) -> Program:
    """Merges constants that hold equal arrays."""
    return replace(program, closed_jaxpr=once(program.closed_jaxpr))


def compute_masks_in_loops(program: Program) -> Program:
    """Computes masks in the loops that read them, not in a loop before."""
    made = masks_in_loops.compute_masks_in_loops(program.closed_jaxpr)
    return replace(program, closed_jaxpr=made)


def take_slices_out_of_loops(program: Program) -> Program:
    """Slices integers once in front of a loop, and not at each of its steps."""
    made = slices_before_loops.take_slices_out(program.closed_jaxpr)
    return replace(program, closed_jaxpr=made)


def make_masks_in_shards(program: Program) -> Program:
    """Makes masks in the shard_maps, and at the slices, that read parts of them."""
    made = masks_in_shards.make_masks_in_shards(program.closed_jaxpr)
    return replace(program, closed_jaxpr=made)


def join_terms_of_losses(program: Program) -> Program:
    """Adds up the terms of a loss row by row, where they are means of the same rows."""
    return replace(program, closed_jaxpr=join(program.closed_jaxpr))


def multiply_softmaxes(program: Program) -> Program:
    """Multiplies softmaxes by the values, where a sum of them or of their parts is."""
    made = program.closed_jaxpr
    if "scan" in program.primitives:
        made = pairs_of_loops.change_pairs(made, _of_softmaxes)
    change = lambda body: _of_softmaxes(body) or body
    made = map_bodies(made, change, wanted={"dot_general"})
    return replace(program, closed_jaxpr=made)


def _of_softmaxes(body: Any) -> Any:
    """A body with softmaxes multiplied by the values; None without sums of any."""
    if not differences_of_softmaxes.multiplies_sums(body):
        return None
    one = differences_of_softmaxes.changed(body)
    return parts_of_softmaxes.changed(one or body) or one


def sum_each_cotangent(program: Program) -> Program:
    """Sums each layer's cotangent of a shared bias, and not the sum of all of them."""
    made = sums_of_cotangents.sum_each(program.closed_jaxpr)
    return replace(program, closed_jaxpr=made)


def sum_rows_first(program: Program) -> Program:
    """Splits a sum over rows and columns: first over columns, then over rows."""
    return replace(program, closed_jaxpr=sums_of_rows.split(program.closed_jaxpr))


def multiply_whole_matrices(program: Program) -> Program:
    """Multiplies by a widened matrix at once, not by each of its parts."""
    made = whole_products.multiply_whole(program.closed_jaxpr)
    return replace(program, closed_jaxpr=made)


def leave_out_equal_layers(program: Program) -> Program:
    """Removes all but one layer from each run of equal layers."""
    folded = fold(program.closed_jaxpr, program.behind)
    if folded is None:
        return program
    return replace(program, folded=folded, closed_jaxpr=folded.short)


def make_graph(program: Program) -> Program:
    """Makes the graph of values and equations."""
    custom = any(name.startswith("custom_") for name in program.primitives)
    rules = users_rules(program.closed_jaxpr) if custom else {}
    ours = proved(rules) if rules else frozenset()
    regions = Regions(Graph(program.closed_jaxpr, ours))
    return replace(program, regions=regions, rules=rules, proved=ours)


def find_sites(program: Program) -> Program:
    """Finds and proves the sites, also what unproved rules of derivatives hide."""
    config = program.config
    options = program.patterns, config.numerics, config.assume
    found = search(program.walks, *options)
    unproved = program.rules.keys() - program.proved
    if unproved:
        without = Regions(Graph(program.closed_jaxpr, program.rules))
        hidden = search(without, *options).matches
        more = hidden_by_rules(hidden, found, without, unproved)
        there = {(miss.op, miss.where) for miss in more}
        rest = (m for m in found.misses if (m.op, m.where) not in there)
        found = replace(found, misses=(*more, *rest))
    return replace(
        program,
        found=found,
        matches=found.matches,
        facts=tuple(map(Facts, found.matches)),
        failures=found.failures,
    )


def prefer_special_forms(program: Program) -> Program:
    """Prefers a special form of an op where one of its kernels is chosen."""
    assert program.found is not None
    config, nodes = program.config, program.walks.graph.nodes
    differentiated = any(map(is_of_gradient, nodes))
    matches = prefer_special_ops(
        program.found, config, target_of(config), differentiated
    )
    return replace(program, matches=matches, facts=tuple(map(Facts, matches)))


def choose_composites(program: Program) -> Program:
    """Chooses between a composite op and its parts."""
    matches = with_composites(
        program.walks, program.matches, program.config, program.placement
    )
    return replace(program, matches=matches, facts=tuple(map(Facts, matches)))


def find_gradients(program: Program) -> Program:
    """Finds the gradients that the program computes for each match."""
    assert program.found is not None
    found = search_gradients(program.walks, program.matches)
    if any(m.op.form_of for m in found.matches):
        found = with_general_forms(program.walks, program.found.matches, found)
    facts = tuple(
        Facts(match, backward, why)
        for match, backward, why in zip(
            found.matches, found.backward, found.why, strict=True
        )
    )
    failures = (*program.failures, *found.failures)
    return replace(program, facts=facts, failures=failures)


def split_over_devices(program: Program) -> Program:
    """Finds how each site is split over the devices of a mesh."""
    matches, left = [f.match for f in program.facts], dict[int, str]()

    def step(some: Sequence[Match]) -> Any:
        return located(program.walks, some, program.placement)

    while True:
        here = [m for m in matches if id(m) not in left]
        try:
            shards = iter(step(here))
        except Exception as error:
            match, why = _failing(step, here, error)
            program = _saying(program, match, why)
            left[id(match)] = f"splitting it failed, {_text(why)}"
            continue
        facts = (
            replace(f, shards=left.get(id(f.match)) or next(shards))
            for f in program.facts
        )
        return replace(program, facts=tuple(facts))


def choose_kernels(program: Program) -> Program:
    """Chooses a kernel for each site, or leaves it to XLA."""
    while True:

        def step(some: Sequence[Facts], now: Program = program) -> Plan:
            return planned(now.walks, some, now.config, now.folded)

        try:
            return replace(program, plan=step(program.facts))
        except Exception as error:
            one, why = _failing(step, program.facts, error)
            facts = (_forward_only(f, like=one.match) for f in program.facts)
            program = _left_as_written(program, one.match, why)
            program = replace(program, facts=tuple(facts))


def _forward_only(facts: Facts, like: Match) -> Facts:
    """The facts without gradients, if the match is of the same op at the same line."""
    match = facts.match
    same = (match.op.name, match.where) == (like.op.name, like.where)
    return replace(facts, backward=None) if same else facts


def remember_pairs(program: Program) -> Program:
    """Keeps each site as written and replaced, to compare both at the first call."""
    inputs = len(program.original.in_avals)
    pairs = pairs_of(program.walks.graph, program.plan.splices, inputs)
    return replace(program, pairs=pairs)


def replace_sites(program: Program) -> Program:
    """Puts the sites into the program; one for which that fails stays out."""
    while True:

        def step(some: Sequence[Splice], now: Program = program) -> Any:
            return splicing.replace(now.walks, some)

        try:
            closed_jaxpr, origins = step(program.plan.splices)
        except Exception as error:
            splice, why = _failing(step, program.plan.splices, error)
            program = choose_kernels(_left_as_written(program, splice.match, why))
        else:
            return replace(program, closed_jaxpr=closed_jaxpr, origins=origins)


def _failing(
    step: Callable[[Sequence[Item]], object], items: Sequence[Item], error: Exception
) -> tuple[Item, Exception]:
    """The item to leave out of a step that failed, and why; errors of users go on."""
    log.debug("one of %d sites fails", len(items), exc_info=error)
    found = None if isinstance(error, RewriterError) else failing(step, items)
    if found is None:
        raise error
    return found


def _left_as_written(program: Program, match: Match, why: Exception) -> Program:
    """The program with a match that is not replaced, because it cannot be."""
    config, op = program.config, match.op.name
    if (op, match.where) in {known[:2] for known in config.failing}:
        raise why
    this = op, match.where, f"rewriting it failed, {_text(why)}"
    return _saying(
        replace(program, config=replace(config, failing=(*config.failing, this))),
        match,
        why,
    )


def _saying(program: Program, match: Match, why: Exception) -> Program:
    """The program with a failure in its report."""
    reason = Reason("internal", f"{match.op.name}: {_text(why)}", match.where)
    return replace(program, failures=(*program.failures, reason))


def _text(why: Exception) -> str:
    return f"{type(why).__name__}: {why}"


def write_equal_layers(program: Program) -> Program:
    """Applies one layer's rewrite to the layers that were left out."""
    folded, closed_jaxpr = program.folded, program.closed_jaxpr
    assert folded is not None
    if closed_jaxpr is folded.short:
        closed_jaxpr = folded.whole
    elif program.origins is None:
        raise TurnsDiffer("residuals are passed from body to body")
    else:
        closed_jaxpr = _unfolded(program)
    return replace(program, closed_jaxpr=closed_jaxpr)


def _unfolded(program: Program) -> ClosedJaxpr:
    """The program with all its layers; if that fails, they are taken one by one."""
    folded, origins = program.folded, program.origins
    assert folded is not None
    assert origins is not None
    try:
        return unfold(folded, program.closed_jaxpr, origins, program.plan.labels)
    except (RewriterError, TurnsDiffer):
        raise
    except Exception as error:
        raise TurnsDiffer(_text(error)) from error


def save_in_checkpoints(program: Program) -> Program:
    """Saves results that a checkpoint would compute again, within the memory budget."""
    memory = program.config.checkpoint_memory
    if isinstance(program.placement, str):
        memory = 0
    elif program.placement is not None:
        # How XLA splits values is not known here: count all of them on each device.
        memory //= math.prod(program.placement.sizes.values())
    closed_jaxpr, kept = save(program.closed_jaxpr, memory)
    offered = unspent(closed_jaxpr) if program.replaced else ()
    changes = (*program.changes, *kept)
    return replace(program, closed_jaxpr=closed_jaxpr, changes=changes, offered=offered)


def add_residuals_in_kernels(program: Program) -> Program:
    """Moves a residual add into the kernel that can compute it."""
    return replace(program, closed_jaxpr=fuse_residual_adds(program.closed_jaxpr))


def compute_gradients_with_results(program: Program) -> Program:
    """Computes a site and its gradients at once, if the cotangent is known first."""
    return replace(program, closed_jaxpr=compute_together(program.closed_jaxpr))


def pass_transposed_operands(program: Program) -> Program:
    """Passes transposed operands to kernels without a copy."""
    return replace(program, closed_jaxpr=use_memory_order(program.closed_jaxpr))


def pass_packed_operands(program: Program) -> Program:
    """Passes operands that are parts of one array to kernels without a copy.

    Gradients that are put together into one array are written into it likewise, and
    parts that all heads share are not copied to each.
    """
    read = use_shared_parts(use_packed_operands(program.closed_jaxpr))
    return replace(program, closed_jaxpr=join_gradients(read))


def keep_checkpoint_policies(program: Program) -> Program:
    """Makes a checkpoint save no more than the original's policy saves."""
    return replace(program, closed_jaxpr=keep_policies(program.closed_jaxpr))


def beside_sites(
    change: BodyPass, when: Callable[[Program], bool], alone: bool = False
) -> Pass:
    """Returns a pass that changes equations beside the sites.

    Args:
        change: What it does to a body; its changes are in the report.
        when: Whether to run it on a program.
        alone: Whether it also runs on a program in which no pattern can occur.
    """

    def run(program: Program) -> Program:
        device = target_of(program.config)
        closed_jaxpr, found = change(program.closed_jaxpr, device)
        changes = (*program.changes, *found)
        return replace(program, closed_jaxpr=closed_jaxpr, changes=changes)

    run.__doc__ = change.change.__doc__
    return Pass(change.kind.by, run, when, optional=True, alone=alone)
