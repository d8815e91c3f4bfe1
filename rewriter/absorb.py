"""A rewritten program in; out, with additions beside its sites made by their kernels.

    h = add x r        y = site h …      →    y, h = site x … r
    y = site h …       … read h          →    y, k = site h …;  … read k
    d = backward h …   t = add_any p d   →    t = backward h … p

The first two are for kernels that `adds_to` their operand, where h is read on; see
`rewriter.residual_stream`. Values are those of the program as it was, but that t is
rounded once. In the second, k is h, and only the gradients of that program gain: what
JAX would add up by itself gets to the kernel. So it is not done to sites whose
gradients are in the program, which have residuals.

An addition is left where its terms or its result have another shape or dtype than the
operand, and where the equation that would make it cannot stand where all it reads is
there and nobody reads its results yet.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from rewriter import _jax, residual_stream, site

SUMS = frozenset({"add", "add_any"})

OF_PRODUCTS = False
"""Whether to take sums out of XLA's hands of which a term is a matrix product.

XLA may add in a product's kernel, which saves what an addition in ours does. Compiled
ahead of time for an H200, with no measurements to choose by (jax 0.11.2), it did so to
one in four sums of a decoder's layers of 4096 columns.
"""

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
MOVED = frozenset({"convert_element_type", "reshape", "transpose"})


def absorbed(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with the additions made in its sites; itself if there are none.

    Args:
        program: A rewritten program.
    """
    return _absorbed(program, {})


def _absorbed(body: Any, known: dict[int, Any]) -> Any:
    """A jaxpr, closed or not; equal bodies stay one object."""
    if id(body) not in known:
        eqns = [_with_bodies(e, known) for e in body.eqns]
        work = _Body(getattr(body, "jaxpr", body), eqns)
        made, outs = work.absorbed()
        same = len(made) == len(body.eqns) and all(map(_is, made, body.eqns))
        known[id(body)] = body if same else _jax.with_equations(body, made, outs)
    return known[id(body)]


def _is(a: Any, b: Any) -> bool:
    return a is b


def _with_bodies(eqn: Any, known: dict[int, Any]) -> Any:
    changed = {}
    for name, value in eqn.params.items():
        many = isinstance(value, tuple)
        bodies = value if many else (value,)
        if bodies and all(isinstance(b, ClosedJaxpr | Jaxpr) for b in bodies):
            new = tuple(_absorbed(b, known) for b in bodies)
            if not all(map(_is, new, bodies)):
                changed[name] = new if many else new[0]
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


class _Body:
    """The equations of one body, each at its position, and who makes and reads what.

    What a body returns is read behind all of them.
    """

    def __init__(self, jaxpr: Any, eqns: list[Any]):
        self.eqns: list[Any] = list(eqns)  # None where one was absorbed
        self.outs = jaxpr.outvars
        self.made: dict[Any, int] = {}
        self.read: dict[Any, list[int]] = {}
        self.handed: dict[int, tuple[Any, Any]] = {}  # by position: h and k
        sites = (site.site_p, site.backward_p)
        self.sites = [
            i
            for i, e in enumerate(eqns)
            if e.primitive in sites and e.params["use"].adds_to
        ]
        if self.sites:
            for i, eqn in enumerate(eqns):
                self.made.update(dict.fromkeys(eqn.outvars, i))
                self._reads(i, eqn.invars)
            self._reads(len(eqns), self.outs)

    def _reads(self, position: int, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if not _jax.is_literal(atom):
                bisect.insort(self.read.setdefault(atom, []), position)

    def absorbed(self) -> tuple[list[Any], Sequence[Any]]:
        """The new equations, and what the body returns."""
        for i in self.sites:
            eqn = self.eqns[i]
            if eqn.params["batch"]:
                continue
            if eqn.primitive is site.backward_p:
                self._cotangent(i, eqn)
            elif not self._sum(i, eqn) and not eqn.params["residuals"]:
                self._hand_on(i, eqn)
        env: dict[Any, Any] = {}
        made = []
        for i, eqn in enumerate(self.eqns):
            if eqn is not None:
                made.append(_jax.reading(eqn, env) if env else eqn)
            if i in self.handed:
                old, new = self.handed[i]
                env[old] = new
        if not env:
            return made, self.outs
        return made, [a if _jax.is_literal(a) else env.get(a, a) for a in self.outs]

    # ------------------------------------------------------------------ forward
    def _sum(self, i: int, eqn: Any) -> bool:
        """Whether a site makes its operand, a sum, now."""
        at, h = _operand(eqn)
        where = self.made.get(h, -1)
        add = self.eqns[where] if where >= 0 else None
        beside = [r for r in self.read.get(h, ()) if r != i]
        if add is None or not _adds(add, h) or not beside:
            return False
        if not OF_PRODUCTS and any(map(self._is_product, add.invars)):
            return False
        others = [v for k, v in enumerate(eqn.invars) if k != at]
        if beside[0] > i:
            place = i
        elif all(self._is_made_before(v, where) for v in others):
            place = where
        else:
            return False
        operands = [*eqn.invars[:at], add.invars[0], *eqn.invars[at + 1 :]]
        params = {k: eqn.params[k] for k in ("use", "residuals")}
        new = eqn.replace(
            primitive=residual_stream.site_p,
            invars=[*operands, add.invars[1]],
            outvars=[*eqn.outvars, h],
            params=params,
        )
        self._replace((i, where), place, new)
        return True

    def _is_product(self, atom: Any) -> bool:
        """Whether a value is a matrix product, in any layout, with or without bias."""
        eqn = self._maker(atom)
        while eqn is not None and eqn.primitive.name not in PRODUCTS:
            whole = [v for v in eqn.invars if not self._is_broadcast(v, eqn)]
            if eqn.primitive.name == "add" and len(whole) == 1:
                eqn = self._maker(whole[0])
            elif eqn.primitive.name in MOVED:
                eqn = self._maker(eqn.invars[0])
            else:
                return False
        return eqn is not None

    def _is_broadcast(self, atom: Any, eqn: Any) -> bool:
        """Whether an operand has less numbers than what is computed."""
        maker = self._maker(atom)
        whole = atom.aval.shape == eqn.outvars[0].aval.shape
        return not whole or (
            maker is not None and maker.primitive.name == "broadcast_in_dim"
        )

    def _maker(self, atom: Any) -> Any:
        where = -1 if _jax.is_literal(atom) else self.made.get(atom, -1)
        return self.eqns[where] if where >= 0 else None

    def _hand_on(self, i: int, eqn: Any) -> None:
        """Lets those that read a site's operand later read what it hands on."""
        _, h = _operand(eqn)
        if self.read.get(h, [i])[-1] == i:
            return
        new = _jax.new_var(h.aval)
        self.handed[i] = h, new
        self.eqns[i] = eqn.replace(
            primitive=residual_stream.site_p,
            outvars=[*eqn.outvars, new],
            params={k: eqn.params[k] for k in ("use", "residuals")},
        )

    # ------------------------------------------------------------------ gradients
    def _cotangent(self, i: int, eqn: Any) -> None:
        """Lets a backward add what comes along its operand's cotangent."""
        use, wrt = eqn.params["use"], eqn.params["wrt"]
        if use.adds_to not in wrt:
            return
        at = wrt.index(use.adds_to)
        own = value = eqn.outvars[at]
        through = [i]
        add = None
        while add is None:
            readers = self.read.get(value, ())
            if len(readers) != 1 or readers[0] == len(self.eqns):
                return
            through.append(readers[0])
            reader = self.eqns[readers[0]]
            if _adds(reader, own):
                add = reader
            elif _keeps_all(reader, own):
                value = reader.outvars[0]
            else:
                return
        passing = next(v for v in add.invars if v is not value)
        rest = [v for v in eqn.outvars if v is not own]
        if self._is_made_before(passing, i):
            place = i
        elif all(r > through[-1] for v in rest for r in self.read.get(v, ())):
            place = through[-1]
        else:
            return
        new = eqn.replace(
            primitive=residual_stream.backward_p,
            invars=[*eqn.invars, passing],
            outvars=[*eqn.outvars[:at], add.outvars[0], *eqn.outvars[at + 1 :]],
            params={"use": use, "wrt": wrt},
        )
        self._replace(through, place, new)

    # ---------------------------------------------------------------------- both
    def _is_made_before(self, atom: Any, position: int) -> bool:
        return _jax.is_literal(atom) or self.made.get(atom, -1) < position

    def _replace(self, positions: Sequence[int], place: int, new: Any) -> None:
        """Puts an equation in the place of one of some that it stands for."""
        for k in positions:
            for atom in self.eqns[k].invars:
                if not _jax.is_literal(atom):
                    self.read[atom].remove(k)
            self.eqns[k] = None
        self.eqns[place] = new
        self.made.update(dict.fromkeys(new.outvars, place))
        self._reads(place, new.invars)


def _operand(eqn: Any) -> tuple[int, Any]:
    """The operand of a site that its kernel adds to, and which it is."""
    use = eqn.params["use"]
    at = use.names.index(use.adds_to)
    return at, eqn.invars[at]


def _adds(eqn: Any, like: Any) -> bool:
    """Whether an equation adds two arrays like another one, and gives one."""
    if eqn.primitive.name not in SUMS or any(map(_jax.is_literal, eqn.invars)):
        return False
    first, second = eqn.invars
    return first is not second and all(
        _alike(v, like) for v in (first, second, eqn.outvars[0])
    )


def _alike(one: Any, other: Any) -> bool:
    a, b = one.aval, other.aval
    return (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def _keeps_all(eqn: Any, like: Any) -> bool:
    """Whether an equation casts to a dtype that has all numbers of an array's."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtype = eqn.outvars[0].aval.dtype
    return bool(jnp.promote_types(dtype, like.aval.dtype) == dtype)
