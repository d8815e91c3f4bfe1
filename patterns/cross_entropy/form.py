"""Reads the parameters of a loss off its form, and the logits that it is of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from rewriter.algebra.canonicalize.arithmetic import counts_hits
from rewriter.algebra.canonicalize.gathered_entries import NEAREST, PROMISED
from rewriter.algebra.normal_form import TRUE, Algebra, Index, Monomial, Poly
from rewriter.find.reading import Refused, flat_indices
from rewriter.patterns.cross_entropy.two_labels import Pick, two_labels

OUTSIDE = {"clip": f"{NEAREST} ", "promise": f"{PROMISED} "}
"""What labels pick that are no class, by how the name of their form begins."""


@dataclass(frozen=True)
class Loss:
    """A loss over classes.

    Attributes:
        rows: The indices of its rows.
        v: The index of the classes.
        logits: The form of the logits over both, before a soft cap.
        soft_cap: The bound of the logits; 0 for none.
        labels: The form of each row's label, an array or the row's own number.
        other: The same of another label; empty if there is none.
        share: The form of the share of the target that the other label has.
        times: What the loss of each row is multiplied by: a number, and perhaps weights
            of rows.
        params: Parameters of the op.
    """

    rows: tuple[int, ...]
    v: int
    logits: Poly
    soft_cap: float
    labels: Poly
    other: Poly
    share: Poly
    times: Poly
    params: Mapping[str, Any]


def loss_of(alg: Algebra, form: Poly, args: tuple[Index, ...]) -> Loss:
    """The loss that a form is.

    Raises:
        Refused: If it is none.
    """
    rows = tuple(i for a in args for i in flat_indices(a))
    total = _total(alg, form)
    weights = _weights(alg, form, total)
    if weights:
        form = _without(form, weights)
    if all(any(a == total for a, _ in mono) for _, mono in form):
        text = "no label's logit is subtracted from the log-sum-exp"
        raise Refused("labels", text, score=0.2, difference=alg.show(form))
    v, used, logits = _logits(alg, total)
    bound, inner = _capped(alg, logits)
    if alg.ids(logits) - {v} - set(rows):
        raise Refused("axes", "an axis of the logits is not one of the loss", score=0.3)
    diagonal = _diagonal(alg, form, rows, v, logits)
    other, share, mixed = Poly(), Poly(), False
    if diagonal:
        labels, form, outside = *diagonal, "nan"
        picks = _Picks(alg, form, total)
    else:
        picks = _Picks(alg, form, total)
        if both := two_labels(alg, form, picks.pick_of):
            form, other, share, mixed = astuple(both)
            picks = _Picks(alg, form, total)
        labels, outside = picks.labels(v)
    parts = picks.parts(bound)
    own, alike = parts["label"], parts["alike"]
    factor = own + alike if own else alike
    params: dict[str, Any] = {"outside": outside}
    if mixed:
        params["mixed"] = True
    if own:
        params["of_log_probabilities"] = True
        smoothing = alike / factor
    else:
        smoothing = -_of_mean(alg, form, logits, v) / factor
    if not factor:
        raise Refused("terms", "the loss has no log-sum-exp of the logits", score=0.3)
    if used:
        if not parts["fill"] or smoothing:
            raise Refused("masked", "some classes are left out by a mask", score=0.5)
        params |= {"used": used, "fill": parts["fill"] / factor}
        if outside == "zero" and not math.isfinite(params["fill"]):
            text = "infinite logits of classes that are left out are multiplied with 0"
            raise Refused("masked", text, score=0.5)
    for name, number in (
        ("label_smoothing", smoothing),
        ("z_loss", parts["squared"] / factor),
    ):
        if number:
            params[name] = number
    times = {(TRUE, weights): factor}
    target = labels, other, share
    return Loss(rows, v, inner, abs(bound), *target, times, params)


def _diagonal(
    alg: Algebra, form: Poly, rows: tuple[int, ...], v: int, logits: Poly
) -> tuple[Poly, Poly] | None:
    """(labels, rest) of a form in which each row's own number is its label.

    So are the losses of pairs, whose similarities have the right pairs on the diagonal.
    The rest is the form without the picked logits.
    """
    for row in rows:
        if not alg.never_larger(row, v):
            continue
        picked, _ = alg.split_constant(alg.subst(logits, {v: row}))[::-1]
        if not picked or any(key not in form for key in picked):
            continue
        key, c = next(iter(picked.items()))
        rest = alg.add(form, alg.scale(picked, -form[key] / c))
        if not any(key in rest for key in picked):
            return alg.iota(row), rest
    return None


def _weights(alg: Algebra, form: Poly, total: int) -> Monomial:
    """Arrays that all terms of a form are multiplied with, such as a mask of rows."""
    monos = [dict(mono) for _, mono in form]
    common = set(monos[0].items()).intersection(*(m.items() for m in monos[1:]))
    return tuple(
        sorted(f for f in common if f[0] != total and alg.kind(f[0]) == "leaf")
    )


def _without(form: Poly, weights: Monomial) -> Poly:
    """A form without factors that all of its terms have."""
    return {
        (flag, tuple(f for f in mono if f not in weights)): c
        for (flag, mono), c in form.items()
    }


def _capped(alg: Algebra, logits: Poly) -> tuple[float, Poly]:
    """(c, y) of logits ``c tanh(y / c)``, without a number added; or (0, them).

    That is ``-2 c / (1 + exp(2 y / c))`` and c.
    """
    if len(logits) != 1:
        return 0.0, logits
    (((flag, mono), twice),) = logits.items()
    saturated = len(mono) == 1 and mono[0][1] == -1 and alg.kind(mono[0][0]) == "pow"
    if flag != TRUE or not saturated:
        return 0.0, logits
    one, rest = alg.split_constant(alg.thaw(alg.defs[mono[0][0]][1]))
    found = alg.exponents(rest) if one == 1 and len(rest) == 1 else None
    if not found:
        return 0.0, logits
    c = -twice / 2
    return c, alg.scale(found[0], c / 2)


def _total(alg: Algebra, form: Poly) -> int:
    """The logarithm of a sum of exponentials in a form."""
    found = {a for _, mono in form for a, _ in mono if alg.kind(a) == "log"}
    if len(found) != 1:
        text = "it has no logarithm of a sum of exponentials"
        if found:
            text = f"it joins {len(found)} log-sum-exps, as a divergence does, and a "
            text += "loss has one"
        raise Refused("terms", text, score=0.2, difference=alg.show(form))
    (atom,) = found
    return atom


def _logits(alg: Algebra, total: int) -> tuple[int, int, Poly]:
    """The index of classes, how many are used, and the logits, of a log-sum-exp.

    It is 0 if all are used.
    """
    inner = alg.thaw(alg.defs[total][1])
    sums: list[int] = []
    if len(inner) == 1:
        (((flag, mono), c),) = inner.items()
        if flag == TRUE and c == 1 and len(mono) == 1:
            sums = [a for a, _ in mono if alg.kind(a) == "sum"]
    if not sums:
        some = any(alg.kind(a) == "sum" for _, mono in inner for a, _ in mono)
        raise Refused(
            "total",
            "the logarithm is not of one sum of exponentials over all classes",
            score=0.3 if some else 0.2,  # a softplus has none
            difference=alg.show(inner),
        )
    bound, where, product = alg.open_sum(sums[0])
    found = alg.exponents({(TRUE, product): 1.0})
    if len(bound) != 1 or not found:
        raise Refused("total", "the sum is not of exponentials", score=0.3)
    return bound[0], _used(alg, where, bound[0]) if where != TRUE else 0, found[0]


def _used(alg: Algebra, where: int, v: int) -> int:
    """How many of the first classes a condition leaves."""
    literals, table = alg.bools[where]
    if len(literals) == 1 and alg.kind(literals[0]) == "ge":
        number, rest = alg.split_constant(alg.thaw(alg.defs[literals[0]][1]))
        up = {0b01: 1.0, 0b10: -1.0}.get(table, 0.0)
        count = -number if up > 0 else number + 1
        if rest == alg.scale(alg.iota(v), up) and count == int(count) > 0:
            return int(count)
    raise Refused("masked", "some classes are left out by a mask", score=0.5)


class _Picks:
    """The terms of a form, by what they are.

    Args:
        alg: Where it is.
        form: The form.
        total: Its logarithm of a sum.
    """

    def __init__(self, alg: Algebra, form: Poly, total: int):
        self.alg, self.form, self.total = alg, form, total

    def labels(self, v: int) -> tuple[Poly, str]:
        """The labels, and what labels pick that are no class.

        Args:
            v: The index of the classes.
        """
        alg = self.alg
        found: dict[tuple[Any, str], Poly] = {}
        fills = False
        for _, mono in self.form:
            for a, _ in mono:
                fills |= _is_fill(alg, a)
                if alg.kind(a) == "sum" and alg.defs[a][2] != TRUE and alg.defs[a][3]:
                    label, outside = self._label_of(alg.defs[a][2], alg.defs[a][1])
                    found[tuple(sorted(label.items())), outside] = label
        if len(found) != 1:
            text = "several arrays of labels pick logits"
            if not found:
                text = "the targets are no labels that pick one logit of each row"
            targets = self._has_targets() and not self._of_own_chances()
            score = 0.5 if found else 0.3 if targets else 0.2
            difference = alg.show(self.form)
            if not found and self._picks_one_class():
                text = "all rows have one class as their label"
                raise Refused("one_class", text, score=0.5, difference=difference)
            raise Refused("labels", text, score=score, difference=difference)
        (((_, outside), label),) = found.items()
        return label, "nan" if fills else outside

    def pick_of(self, atom: int) -> Pick | None:
        """The labels by which an atom picks, if it does.

        A fill is what a label picks that is no class.
        """
        alg = self.alg
        if _is_fill(alg, atom):
            return ((alg.thaw(alg.defs[atom][2]), "nan"),), 0b10
        if alg.kind(atom) != "sum" or alg.defs[atom][2] == TRUE:
            return None
        names, flag = alg.defs[atom][1:3]
        literals, table = alg.bools[flag]
        pairs = len(literals) == 2 and all(alg.kind(a) == "eq" for a in literals)
        try:
            if pairs:
                found = [self._equal(a) for a in literals]
            else:
                found, table = [self._label_of(flag, names)], 0b10
        except Refused:
            return None
        filled = ((p, "nan" if self._fills(p) else outside) for p, outside in found)
        return tuple(filled), table

    def _fills(self, label: Poly) -> bool:
        """Whether there is a fill for a label."""
        alg = self.alg
        atoms = {a for _, mono in self.form for a, _ in mono if _is_fill(alg, a)}
        return any(alg.thaw(alg.defs[a][2]) == label for a in atoms)

    def _picks_one_class(self) -> bool:
        """Whether a logit of each row is taken at one place, as in `logs[:, 0]`."""
        alg = self.alg
        atoms = {a for _, mono in self.form for a, _ in mono if alg.kind(a) == "leaf"}
        return any(
            alg.defs[a][1] == alg.defs[whole][1]
            and any(
                place != at and not alg.index_ids(place)
                for place, at in zip(alg.defs[a][2], alg.defs[whole][2], strict=True)
            )
            for a in atoms
            for whole in alg.leaves(self.total)
        )

    def _has_targets(self) -> bool:
        """Whether something besides the logits is summed, as soft targets are."""
        alg = self.alg
        sums = [a for _, m in self.form for a, _ in m if alg.kind(a) == "sum"]
        if any(alg.kind(a) != "leaf" for s in sums for a, _ in alg.defs[s][3]):
            return True
        own = alg.poly_leaves(alg.thaw(alg.defs[self.total][1]))
        every = alg.poly_leaves(self.form)
        return bool({alg.defs[a][1] for a in every} - {alg.defs[a][1] for a in own})

    def _of_own_chances(self) -> bool:
        """Whether the rows' own probabilities are multiplied, as in an entropy."""
        inner = self.alg.thaw(self.alg.defs[self.total][1])
        own = {a for _, mono in inner for a, _ in mono}
        return any(a in own and e < 0 for _, mono in self.form for a, e in mono)

    def _label_of(self, flag: int, names: Any) -> tuple[Poly, str]:
        """The label of a sum over `names` of what a condition picks."""
        alg = self.alg
        literals, table = alg.bools[flag]
        label = self._own_number(literals, table, names)
        if label:
            return label, "zero"
        equal = [a for a in literals if alg.kind(a) == "eq"]
        others = {alg.kind(a) for a in literals if a not in equal}
        plain = not others and table == 0b10
        if len(equal) != 1 or not (plain or others == {"ge"}):
            raise Refused("labels", "entries are picked by a mask", score=0.4)
        return self._equal(equal[0])

    def _equal(self, literal: int) -> tuple[Poly, str]:
        """The label that a condition compares the class with, and what is no class.

        Raises:
            Refused: If labels are no array.
        """
        alg = self.alg
        outside, rest = "zero", alg.thaw(alg.defs[literal][1])
        atoms = [a for _, mono in rest for a, _ in mono if alg.kind(a) != "iota"]
        if len(atoms) == 1 and alg.defs[atoms[0]][0] == "fn":
            name, inner = alg.defs[atoms[0]][1:3]
            found = [
                how for how, is_so in OUTSIDE.items() if str(name).startswith(is_so)
            ]
            if found:
                outside = found[0]
                atoms = [a for (_, m), _ in inner for a, _ in m]
        if len(atoms) != 1 or alg.kind(atoms[0]) != "leaf":
            raise Refused("labels", "labels are not an array of integers", score=0.4)
        return alg.of_atom(atoms[0]), outside

    def _own_number(self, literals: Any, table: int, names: Any) -> Poly | None:
        """The row's number i of the condition j = i on the summed index j.

        That is ``i - j >= 0`` without ``i - j - 1 >= 0``, or with i and j swapped.
        """
        alg = self.alg
        if len(literals) != 2 or {alg.kind(a) for a in literals} != {"ge"}:
            return None
        forms = [alg.thaw(alg.defs[a][1]) for a in literals]
        if table not in (0b0010, 0b0100):
            return None
        holds, fails = forms if table == 0b0010 else forms[::-1]
        if alg.add(holds, fails, -1.0) != alg.const(1.0):
            return None
        for index in (a for _, mono in holds for a, _ in mono):
            if alg.kind(index) != "iota" or alg.defs[index][1] in names:
                continue
            for name in names:
                apart = alg.add(alg.of_atom(index), alg.iota(name), -1.0)
                if holds in (apart, alg.scale(apart, -1.0)):
                    return alg.of_atom(index)
        return None

    def _is_number(self, atom: int) -> bool:
        """Whether an atom is a single number that the program computes."""
        return self.alg.kind(atom) == "leaf" and not self.alg.free(atom)

    def parts(self, shift: float) -> dict[str, float]:
        """Numbers of the log-sum-exp, of the label's, of its square, and of a fill.

        Args:
            shift: What is added to the logarithm in the log-sum-exp.

        Raises:
            Refused: If a term is something else.
        """
        alg, out = self.alg, dict.fromkeys(("alike", "label", "squared", "fill"), 0.0)
        for (flag, mono), c in self.form.items():
            powers = dict(mono)
            power = powers.pop(self.total, 0)
            others = tuple(powers.items())
            if not power:  # a picked logit may have a temperature
                others = tuple(f for f in others if not self._is_number(f[0]))
            known = flag == TRUE and len(others) <= 1
            if known and power == 1 and not others:
                out["alike"] += c
            elif known and power == 2 and not others:
                out["squared"] += c
            elif known and power == 1 and counts_hits(alg, others[0]):
                out["label"] += c
            elif known and not power and others and counts_hits(alg, others[0]):
                out["fill"] -= c
            elif known and not power and others and _is_plain(alg, others[0]):
                continue
            elif shift and known and not power:
                continue  # the number
            else:
                raise Refused(
                    "terms",
                    "the loss has a term besides the log-sum-exp and picked logits",
                    score=0.3 if not power else 0.4,
                    difference=alg.show({(flag, mono): c}),
                )
        out["alike"] -= 2 * shift * out["squared"]
        return out


def _is_fill(alg: Algebra, atom: int) -> bool:
    d = alg.defs[atom]
    return d[0] == "fn" and str(d[1]).startswith("NaN outside ")


def _is_plain(alg: Algebra, factor: tuple[int, Any]) -> bool:
    """Whether a factor may be a sum of logits, or a fill; the proof says which."""
    atom, e = factor
    return e == 1 and (alg.kind(atom) == "sum" or _is_fill(alg, atom))


def _of_mean(alg: Algebra, form: Poly, logits: Poly, v: int) -> float:
    """The number that the mean of the logits is multiplied by in a form."""
    if not logits:
        return 0.0  # all logits are 0
    key, c = next(iter(logits.items()))
    summed = alg.sum_over({key: c / alg.sizes[v]}, [v])
    if len(summed) != 1:
        return 0.0
    ((at, unit),) = summed.items()
    return form.get(at, 0.0) / unit
