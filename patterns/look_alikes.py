"""Words about operations that no pattern finds, though a reader might expect one.

A report asks for them only where nothing is found, and they change nothing.

Bilinear unit     (x a) * (x b), without an activation.
Two inputs        act(x a) * (y b), of which the factors read different arrays.
Product inside    act((x a) * (x b)): a branch of its own goes through none.
Linear attention  φ(q) (φ(k)ᵀ v) over a sum: no softmax is taken.
Distances         softmax(-|q - k|) v: scores that are no product.
Additive          softmax(w·tanh(q + k)) v: scores of a sum of queries and keys.
Experts in a loop one after another, each for every token.
Gathered matrices x[t] w[expert[t]]: a matrix is read again for each token.
Bounded norm      x / max(root, eps): a bound, and no epsilon inside the root.
Changed weights   f(softmax(q kᵀ)) v, with an f that is no product or choice.
Log of a softmax  log(softmax(y)[label]), and not log_softmax(y)[label].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rewriter.program.graph import Graph, Node
from rewriter.program.lines import is_of_gradient, line_of
from rewriter.program.walk import equations_above, values_below

LAYOUT = frozenset({
    "convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze",
    "expand_dims", "copy", "stop_gradient",
})  # fmt: skip
ACTIVATIONS = frozenset({"logistic", "tanh", "erf", "erfc", "exp"})
CHOICES = frozenset({"top_k", "argmax", "approx_top_k"})
CHANGES = frozenset({
    "abs", "ceil", "cumsum", "floor", "logistic", "max", "min", "round", "sign", "sin",
    "sort", "sqrt", "tanh",
})  # fmt: skip
SQUARED = LAYOUT | {"add", "div", "mul", "reduce_sum"}
SOFTMAX = LAYOUT | {"add", "div", "exp", "mul", "select_n", "sub"}
ONE_AFTER_ANOTHER = (
    "experts are computed one after another for every token: sorted by expert, tokens "
    "fit a ragged dot"
)
SUM = "reduce_sum"
DISTANCE = SOFTMAX | {"abs", "integer_pow", "max", "neg", "reduce_max", SUM, "square"}
SUMS = DISTANCE | ACTIVATIONS | {"dot_general"}
BOUNDS = LAYOUT | {"add", "clamp", "gather", "max", "min"}
SLICES = frozenset({"slice", "dynamic_slice", "gather", "split"})


@dataclass(frozen=True)
class LookAlike:
    """An operation that is no pattern's.

    Attributes:
        op: The op that a reader might expect.
        where: The line.
        text: What it is instead.
    """

    op: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def look_alikes(graph: Graph) -> Iterator[LookAlike]:
    """The operations of a program that are no pattern's, each kind once."""
    nodes = [n for n in graph.nodes if not is_of_gradient(n)]
    for op, find in KINDS:
        found = find(graph, nodes)
        if found is not None:
            yield LookAlike(op, line_of(found[0]), found[1])


def _source(graph: Graph, value: int) -> int:
    """The value below layout and casts."""
    while (node := graph.node_of(value)) is not None and node.prim in LAYOUT:
        value = node.ins[0]
    return value


def _product(graph: Graph, value: int) -> Node | None:
    """The contraction that a value is, below layout and casts."""
    node = graph.node_of(_source(graph, value))
    return node if node is not None and node.prim == "dot_general" else None


def _inputs(graph: Graph, node: Node) -> set[int]:
    return {_source(graph, i) for i in node.ins}


def _bilinear(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "mul" or node.ins[0] == node.ins[1]:
            continue
        a, b = (_product(graph, i) for i in node.ins)
        if a is not None and b is not None and a is not b:
            shared = _inputs(graph, a) & _inputs(graph, b)
            if len(shared) == 1:
                text = "a bilinear unit: neither branch goes through an activation"
                if any(n.prim in ACTIVATIONS for n in _users(graph, node)):
                    text = "the product of both branches goes through an activation, "
                    text += "and not one of them"
                return node, text
    return None


def _users(graph: Graph, node: Node) -> list[Node]:
    """The equations that read a result."""
    return [user for out in node.outs for user in graph.users(out)]


def _of_two_inputs(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "mul":
            continue
        for act, other in (node.ins, node.ins[::-1]):
            up, gate = _product(graph, other), _activated(graph, act)
            if up is None or gate is None:
                continue
            if not _inputs(graph, up) & _inputs(graph, gate):
                return node, "the two branches read different arrays, and not one x"
    return None


def _activated(graph: Graph, value: int) -> Node | None:
    """The contraction h of a value such as h·sigmoid(h)."""
    node = graph.node_of(_source(graph, value))
    if node is None or node.prim != "mul":
        return None
    for own, rest in (node.ins, node.ins[::-1]):
        found = _product(graph, own)
        if found is not None and _reaches(graph, rest, _source(graph, own)):
            return found
    return None


def _reaches(graph: Graph, value: int, wanted: int) -> bool:
    """Whether a value is an activation of another, within a few steps."""
    seen, queue, active = {value}, [value], False
    while queue and len(seen) < 16:
        node = graph.node_of(queue.pop(0))
        if node is None or node.prim == "dot_general":
            continue
        active |= node.prim in ACTIVATIONS
        if active and wanted in node.ins:
            return True
        queue += [i for i in node.ins if i not in seen]
        seen.update(node.ins)
    return False


def _linear_attention(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    if not any(n.prim in ("div", "integer_pow", "rsqrt") for n in nodes):
        return None  # of a sum of weights
    for node in nodes:
        if node.prim != "dot_general" or not node.params["dimension_numbers"][1][0]:
            continue
        for value in node.ins:
            inner = _product(graph, value)
            if inner is None or inner is node or is_of_gradient(inner):
                continue
            if inner.params["dimension_numbers"][1][0]:
                text = "linear attention: keys and values are contracted first, and "
                return node, text + "no softmax is taken"
    return None


def _distances(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "dot_general":
            continue
        for value in node.ins:
            weights = graph.node_of(_source(graph, value))
            if weights is None or weights.prim != "div":
                continue
            if not _is_softmax(graph, weights):
                continue
            above = list(equations_above(graph, weights.ins, DISTANCE, most=40))
            if _meet(graph, above, "sub"):
                text = "the scores are sums of a function of q - k, and no product"
                if any(n.prim in ("integer_pow", "square") for n in above):
                    text += ": of squares, the scores 2 q·k - |k|² give equal weights"
                return node, text
            if _meet(graph, equations_above(graph, weights.ins, SUMS, most=60), "add"):
                return (
                    node,
                    "additive attention: the scores are sums of a function of "
                    "q + k, and no product",
                )
    return None


def _meet(graph: Graph, nodes: Iterable[Node], prim: str) -> bool:
    """Whether an equation takes queries and keys, each repeated along the other."""
    return any(n.prim == prim and _differs(graph, n) for n in nodes)


def _differs(graph: Graph, node: Node) -> bool:
    """Whether each of two arrays is repeated along an axis of the other."""
    repeated = [
        n is not None and n.prim == "broadcast_in_dim" and graph.shape(n.ins[0]) != ()
        for n in map(graph.node_of, node.ins)
    ]
    return all(repeated)


def _gathered_matrices(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "dot_general" or not node.params["dimension_numbers"][1][0]:
            continue
        for value in node.ins:
            taken = graph.node_of(_source(graph, value))
            if taken is not None and _takes_matrices(graph, taken):
                text = "a matrix is gathered for each row: sorted by their matrix, "
                return node, text + "rows fit a ragged dot, which reads it once"
    return None


def _takes_matrices(graph: Graph, node: Node) -> bool:
    """Whether more matrices are gathered of a stack than it has; it is an argument."""
    if node.prim != "gather" or graph.node_of(_source(graph, node.ins[0])) is not None:
        return False
    whole, ids = (graph.shape(i) for i in node.ins)
    if len(whole) != 3 or node.params["slice_sizes"] != (1, *whole[1:]):
        return False
    return math.prod(ids) > whole[0]


def _is_masked_by_ids(graph: Graph, node: Node) -> bool:
    """Whether a product is only kept where ids are one number."""
    for user in _below_layout(graph, node):
        others = [graph.node_of(_source(graph, i)) for i in user.ins]
        if user.prim in ("select_n", "mul") and any(
            n and n.prim == "eq" for n in others
        ):
            return True
    return False


def _experts_in_a_loop(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    chosen = any(n.prim in CHOICES for n in nodes)
    taken: Counter[int] = Counter()
    for node in nodes:
        if node.prim != "dot_general":
            continue
        if not chosen and not _is_masked_by_ids(graph, node):
            continue
        for value in node.ins:
            part = graph.node_of(_source(graph, value))
            if part is None or part.prim not in SLICES:
                continue
            whole = part.ins[0]
            if len(graph.shape(whole)) == 3:
                taken[whole] += 1
                if taken[whole] == 2:
                    return node, ONE_AFTER_ANOTHER
    return None


def _masked_experts_in_a_scan(
    graph: Graph, nodes: list[Node]
) -> tuple[Node, str] | None:
    for node in nodes:
        scope = node.scope
        if node.prim != "dot_general" or scope.kind != "scan" or scope.length < 2:
            continue
        if not _is_masked_by_ids(graph, node):
            continue
        matrices = [graph.shape(i) for i in node.ins if graph.node_of(i) is None]
        stacks = [
            graph.shape(i)
            for n in nodes if n.prim == "scan" and n.scope is scope.parent
            for i in n.ins
        ]  # fmt: skip
        if any((scope.length, *shape) in stacks for shape in matrices):
            return node, ONE_AFTER_ANOTHER
    return None


def _experts_in_a_scan(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    choices = [n for n in nodes if n.prim in CHOICES and graph.shape(n.ins[0])]
    for choice in choices:
        experts = graph.shape(choice.ins[0])[-1]
        below = set(values_below(graph, choice.outs, lambda n: n.prim != "scan", 200))
        for node in nodes:
            if node.prim == "scan" and not below.isdisjoint(node.ins):
                shapes = [graph.shape(i) for i in node.ins]
                stacks = [s for s in shapes if len(s) == 3 and s[0] == experts]
                if node.params["length"] == experts and len(stacks) > 1:
                    return node, ONE_AFTER_ANOTHER
    return None


def _bounded_norm(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "max" or math.prod(graph.shape(node.outs[0])) == 1:
            continue  # a single number, such as the norm of all gradients
        root = next((m for i in node.ins if (m := _root(graph, i))), None)
        if root is None or graph.node_of(_source(graph, root.ins[0])) is None:
            continue
        divided = [n for n in _below_layout(graph, node) if n.prim == "div"]
        above = equations_above(graph, root.ins, SQUARED, most=8)
        if divided and any(n.prim in ("reduce_sum", "reduce_mean") for n in above):
            text = "the root of squares is bounded from below: another function than "
            return node, text + "that with an epsilon inside the root"
    return None


def _root(graph: Graph, value: int) -> Node | None:
    node = graph.node_of(_source(graph, value))
    return node if node is not None and node.prim == "sqrt" else None


def _below_layout(graph: Graph, node: Node) -> list[Node]:
    """The equations that read a result, in any layout."""
    values = [*node.outs, *values_below(graph, node.outs, LAYOUT, 12)]
    return [user for value in values for user in graph.users(value)]


def _changed_weights(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim not in CHANGES:
            continue
        above = equations_above(graph, node.ins, SOFTMAX, most=24)
        prims = {n.prim: n for n in above}
        dot = prims.get("dot_general")
        if dot is None or not {"exp", "div", "reduce_sum"} <= prims.keys():
            continue
        values = [*node.outs, *values_below(graph, node.outs, SOFTMAX | CHANGES, 12)]
        readers = {id(n): n for v in values for n in graph.users(v)}.values()
        if any(n.prim == "dot_general" and n is not dot for n in readers):
            return node, f"the weights of a softmax go through {node.prim} before " + (
                "they weigh values"
            )
    return None


def _log_of_softmax(graph: Graph, nodes: list[Node]) -> tuple[Node, str] | None:
    for node in nodes:
        if node.prim != "log":
            continue
        above = list(equations_above(graph, node.ins, BOUNDS, most=12))
        for chance in above:
            softmax = chance.prim == "div" and _is_softmax(graph, chance)
            picks = softmax and any(n.prim == "gather" for n in above)
            if picks or (softmax and _is_picked(graph, node)):
                text = "the logarithm of a softmax, which is -inf where it rounds to 0"
                return node, text + ": jax.nn.log_softmax is not, and is found"
    return None


def _is_softmax(graph: Graph, node: Node) -> bool:
    """Whether a quotient is one of exponentials and their sum."""
    above, below = (graph.node_of(_source(graph, i)) for i in node.ins)
    if above is None or below is None or (above.prim, below.prim) != ("exp", SUM):
        return False
    return _source(graph, below.ins[0]) == above.outs[0]


def _is_picked(graph: Graph, node: Node) -> bool:
    """Whether one number of each row of a result is read: by a gather or a one-hot."""
    for user in _below_layout(graph, node):
        if user.prim == "gather":
            return True
        others = [graph.node_of(_source(graph, i)) for i in user.ins]
        if user.prim == "mul" and any(n and n.prim == "eq" for n in others):
            return True
    return False


KINDS = (
    ("cross_entropy", _log_of_softmax),
    ("gated_linear_unit", _bilinear),
    ("gated_linear_unit", _of_two_inputs),
    ("attention", _linear_attention),
    ("attention", _changed_weights),
    ("attention", _distances),
    ("ragged_dot", _experts_in_a_loop),
    ("ragged_dot", _experts_in_a_scan),
    ("ragged_dot", _masked_experts_in_a_scan),
    ("ragged_dot", _gathered_matrices),
    ("rms_norm", _bounded_norm),
)
