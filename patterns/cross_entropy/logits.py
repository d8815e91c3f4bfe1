"""The operands of a loss: of the product that makes its logits, or the logits."""

from __future__ import annotations

from typing import Any

from rewriter.algebra.canonicalize import is_lossless
from rewriter.algebra.normal_form import TRUE, Algebra, Monomial, Poly
from rewriter.find.finder import Finder
from rewriter.find.reading import Operand, Refused, operand
from rewriter.patterns.cross_entropy.form import Loss
from rewriter.patterns.cross_entropy.shift import EXPONENTIALS
from rewriter.program.graph import Node


def arrays_of_logits(find: Finder, anchor: Node) -> frozenset[int]:
    """Arrays that a program computes, and whose exponentials a logarithm adds up.

    They may be made in ways that are none of the op's, such as a margin at the label or
    one product beside others. The loss is then one of these arrays.
    """
    g, found = find.graph, set[int]()
    for total in find.regions.above(anchor.ins[0], frozenset({"reduce_sum"})):
        for node in find.regions.above(total.ins[0], EXPONENTIALS):
            value, maker = node.ins[0], g.node_of(node.ins[0])
            if maker is not None and maker.prim == "sub":  # its maximum
                value = maker.ins[0]
            while (maker := g.node_of(value)) is not None and _widens(find, maker):
                value = maker.ins[0]
            if maker is not None:
                found.add(value)
    return frozenset(found)


def _widens(find: Finder, node: Node) -> bool:
    """Whether an equation is a cast that keeps every number."""
    if node.prim != "convert_element_type":
        return False
    return is_lossless(*(find.graph.dtype(v) for v in (*node.ins, *node.outs)))


def logits_operand(alg: Algebra, loss: Loss) -> dict[str, Operand]:
    """Logits and labels, of an array of the program.

    Raises:
        Refused: If the logits are computed from more than one array.
    """
    terms = list(loss.logits)
    whole = (
        len(terms) == 1
        and terms[0][0] == TRUE
        and len(terms[0][1]) == 1
        and alg.kind(terms[0][1][0][0]) == "leaf"
        and not loss.soft_cap
    )
    if not whole:
        text = "the program never has the logits as one array"
        raise Refused("logits", text, score=0.3)
    rows = [(i,) for i in loss.rows]
    logits = operand(loss.logits, *rows, (loss.v,))
    return {"logits": logits, **_target(alg, loss)}


def _target(alg: Algebra, loss: Loss) -> dict[str, Operand]:
    """Each row's label, or two labels and the share of the second."""
    found = {"labels": _labels(alg, loss, loss.labels)}
    if not loss.other:
        return found
    if alg.ids(loss.share) - set(loss.rows):
        raise Refused("labels", "an axis of the shares is not one of the loss")
    rows, known = [(i,) for i in loss.rows], not alg.poly_leaves(loss.share)
    share = operand(loss.share, *rows, dtype="float32" if known else None)
    return found | {"other": _labels(alg, loss, loss.other), "share": share}


def _labels(alg: Algebra, loss: Loss, labels: Poly) -> Operand:
    """A label of each row."""
    if alg.ids(labels) - set(loss.rows):
        raise Refused("labels", "an axis of the labels is not one of the loss")
    ((_, mono),) = labels
    own = any(alg.kind(a) == "iota" for a, _ in mono)
    rows = [(i,) for i in loss.rows]
    return operand(labels, *rows, dtype="int32" if own else None)


def linear_operands(
    alg: Algebra, loss: Loss
) -> tuple[dict[str, Operand], dict[str, Any]]:
    """Rows, weights, bias and labels, and the parameters of the logits.

    Raises:
        Refused: If the logits are not one product of rows with a matrix.
    """
    logits, params = loss.logits, {}
    if loss.soft_cap:
        params["soft_cap"] = loss.soft_cap
    products = {t: c for t, c in logits.items() if _contraction(alg, t) is not None}
    bias = {t: c for t, c in logits.items() if t not in products}
    if len(products) != 1:
        text = f"the logits are a sum of {len(products)} products"
        raise Refused("logits", text, score=0.3, difference=alg.show(logits))
    (((_, mono), c),) = products.items()
    k, x, w = _factors(alg, mono, loss)
    rows = [(i,) for i in loss.rows]
    if c != 1:
        params["scale"] = c
    operands = {
        "x": operand({(TRUE, x): 1.0}, *rows, k),
        "w": operand({(TRUE, w): 1.0}, k, (loss.v,)),
        **_target(alg, loss),
    }
    if bias:
        if any(alg.term_ids(*t) != {loss.v} for t in bias):
            text = "another array is added to the logits of each row"
            raise Refused("bias", text, score=0.4, difference=alg.show(bias))
        operands["bias"] = operand(bias, (loss.v,))
    return operands, params


def _contraction(alg: Algebra, term: tuple[int, Monomial]) -> int | None:
    """The sum that a term is a multiple of, or None."""
    flag, mono = term
    sums = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    return sums[0] if flag == TRUE and len(sums) == 1 else None


def _factors(
    alg: Algebra, mono: Monomial, loss: Loss
) -> tuple[tuple[int, ...], Monomial, Monomial]:
    """The contracted indices, the rows and the weights of a product."""
    atom = _contraction(alg, (TRUE, mono))
    k, flag, inner = alg.open_sum(atom)
    leaves = [f for f in inner if alg.kind(f[0]) == "leaf"]
    more = tuple(f for f in mono if f[0] != atom)
    plain = len(leaves) == len(inner) and not alg.term_ids(TRUE, more)
    if flag != TRUE or not plain:
        raise Refused("logits", "the product has further factors", score=0.4)
    w = tuple(f for f in inner if loss.v in alg.free(f[0]))
    x = (*(f for f in inner if f not in w), *more)
    if not w or not x:
        raise Refused("logits", "the logits are no product with weights", score=0.3)
    if alg.term_ids(TRUE, w) & set(loss.rows):
        raise Refused("weights", "the weights differ from row to row", score=0.4)
    return tuple(k), x, w
