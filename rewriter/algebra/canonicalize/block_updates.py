"""Blocks of an array of zeros, each set at one step of a loop.

Where a loop reads blocks by `dynamic_slice`, each step of its gradient adds the block's
to an array: that of zeros, in which `dynamic_update_slice` sets one block. At position
a that is ``[a // m = step] block[a mod m]``, for blocks of m.
"""

from __future__ import annotations

from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.normal_form import TRUE, Index, OverBudget, Poly
from rewriter.program.graph import Node


@rule("dynamic_update_slice")
def one_block(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The form of an array of zeros with one block.

    Raises:
        OverBudget: If the array is another one, or the block is not that of a step.
    """
    array, block, *starts = node.ins
    alg, flag, at = ev.alg, TRUE, list(args)
    sizes = zip(ev.g.shape(array), ev.g.shape(block), strict=True)
    if ev.number(array) != 0:
        raise OverBudget("a block of an array that is not of zeros")
    for d, ((n, m), start) in enumerate(zip(sizes, starts, strict=True)):
        if n == m:
            continue
        (((here, mono), c), *more) = ev.poly(start, ()).items() or [((TRUE, ()), 0.0)]
        step = alg.defs[mono[0][0]][1] if len(mono) == 1 else None
        whole = here == TRUE and not more and c == m and n % m == 0
        if not whole or not isinstance(step, int) or alg.sizes[step] > n // m:
            raise OverBudget("a step of the loop writes another block than its own")
        same = alg.same_index(alg.div(args[d], m), step)
        flag, at[d] = alg.both(flag, same), alg.mod(args[d], m)
    return alg.mul(alg.of_bool(flag), ev.poly(block, tuple(at), mode))
