"""Index arguments: affine and digit forms of indices, kept canonical."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rewriter import _jax
from rewriter.algebra.normal_form.forms import Index


class Indices:
    """Creates, combines and substitutes index arguments."""

    def new_index(self, size: int) -> Index:
        """A new index of the given size; None for size one."""
        if size == 1:
            return None
        i = next(self._next_index)
        self.sizes[i] = size
        return i

    def spare_indices(
        self, sizes: Iterable[int], args: Iterable[Index]
    ) -> tuple[Index, ...]:
        """Indices that do not occur in some arguments, to be summed over.

        They are the same ones wherever possible, so that a value that is read by
        several sums is looked at once. None for size one.
        """
        taken = {i for a in args for i in self.index_ids(a)}
        out = []
        for size in sizes:
            known = self._spare.setdefault(size, [])
            i = next((i for i in known if i not in taken), None)
            if i is None and size != 1:
                i = self.new_index(size)
                known.append(i)
            if i is not None:
                taken.add(i)
            out.append(i)
        return tuple(out)

    def size_order(self, i: int) -> tuple[int, str]:
        """A key that sorts indices by size, symbolic sizes after numbers."""
        size = self.sizes[i]
        return (size, "") if isinstance(size, int) else (1 << 62, str(size))

    def never_larger(self, i: int, j: int) -> bool:
        """Whether an index has at most the size of another; no if it is open."""
        return _jax.never_larger(self.sizes[i], self.sizes[j])

    def bound_index(self, level: int, slot: int, size: int) -> int:
        """The canonical name of a bound index."""
        key = (level, slot, size)
        name = self._bound.get(key)
        if name is None:
            name = self._bound[key] = -len(self._bound) - 1
            self.sizes[name], self._level_of[name] = size, level
        return name

    def index_range(self, a: Index) -> tuple[int, int]:
        """Bounds of an index argument; symbolic sizes count as the greatest."""
        if a is None:
            return 0, 0
        if isinstance(a, int):
            return 0, _jax.size_range(self.sizes[a])[1] - 1
        if a[0] == "k":
            return a[1], a[1]
        lo, hi = self.index_range(a[1])
        if a[0] == "aff":
            ends = (a[2] * lo + a[3], a[2] * hi + a[3])
            return min(ends), max(ends)
        if a[0] == "cat":
            lo2, hi2 = self.index_range(a[2])
            least, most = _jax.size_range(a[3])
            return min(lo * least, lo * most) + lo2, max(hi * least, hi * most) + hi2
        least, most = _jax.size_range(a[2])
        if least != most:  # of what a symbolic size divides
            return (min(lo, 0), max(hi, 0)) if a[0] == "div" else (0, most - 1)
        if a[0] == "div":
            return lo // most, hi // most
        return (lo % most, hi % most) if lo // most == hi // most else (0, most - 1)

    def cat(self, a: Index, b: Index, n: int) -> Index:
        """A * n + b, where b is below n."""
        if n == 1:
            return a
        if a is None:
            return b
        if b is None:
            return self.affine(a, n, 0)
        if isinstance(b, tuple) and b[0] == "k":
            return self.affine(a, n, b[1])
        if a[0] == "k" if isinstance(a, tuple) else False:
            return self.affine(b, 1, a[1] * n)
        if isinstance(a, tuple) and isinstance(b, tuple):
            if a[0] == "div" and b[0] == "mod" and a[1] == b[1] and a[2] == n == b[2]:
                return a[1]
            if (
                a[0] == "mod"
                and b[0] == "mod"
                and isinstance(a[1], tuple)
                and a[1][0] == "div"
                and a[1][1] == b[1]
                and a[1][2] == n == b[2]
            ):
                return self.mod(b[1], a[2] * n)
            if a[0] == "cat" and b[0] == "mod":  # (a1*m + x//n)*n + x%n
                digits = self.cat(a[2], b, n)
                if isinstance(digits, int) or digits[0] != "cat":
                    return self.cat(a[1], digits, a[3] * n)
        if isinstance(b, tuple) and b[0] == "cat":  # a*n + (b1*m + b2)
            return self.cat(self.cat(a, b[1], n // b[3]), b[2], b[3])
        return ("cat", a, b, n)

    def affine(self, a: Index, m: int, c: int) -> Index:
        """M * a + c."""
        if a is None:
            return ("k", c) if c else None
        if isinstance(a, tuple) and a[0] == "k":
            number = m * a[1] + c
            return ("k", number) if number else None
        if isinstance(a, tuple) and a[0] == "aff":
            return self.affine(a[1], m * a[2], m * a[3] + c)
        return a if (m, c) == (1, 0) else ("aff", a, m, c)

    def div(self, a: Index, n: int) -> Index:
        """A // n."""
        block = _block(*self.index_range(a), n)
        if block is not None:
            return ("k", block) if block else None
        if n == 1:
            return a
        if isinstance(a, tuple):
            if a[0] == "cat":
                if a[3] == n:
                    return a[1]
                if a[3] % n == 0:
                    return self.cat(a[1], self.div(a[2], n), a[3] // n)
                if n % a[3] == 0:
                    return self.div(a[1], n // a[3])
            if a[0] == "aff" and a[2] % n == 0 and a[3] >= 0:
                return self.affine(a[1], a[2] // n, a[3] // n)
            if a[0] == "aff" and a[2] == 1 and a[3] % n == 0:
                return self.affine(self.div(a[1], n), 1, a[3] // n)
            if a[0] == "div":
                return self.div(a[1], a[2] * n)
            if a[0] == "mod" and a[2] % n == 0:  # (x % mn) // n = (x // n) % m
                return self.mod(self.div(a[1], n), a[2] // n)
        return ("div", a, n)

    def mod(self, a: Index, n: int) -> Index:
        """A % n."""
        if n == 1:
            return None
        block = _block(*self.index_range(a), n)
        if block is not None:
            return self.affine(a, 1, -block * n)
        if isinstance(a, tuple):
            if a[0] == "cat":
                if a[3] == n:
                    return a[2]
                if a[3] % n == 0:
                    return self.mod(a[2], n)
                if n % a[3] == 0:
                    return self.cat(self.mod(a[1], n // a[3]), a[2], a[3])
            if a[0] == "aff" and a[2] % n == 0:
                return ("k", a[3] % n) if a[3] % n else None
            if a[0] == "aff" and a[2] == 1 and a[3] % n == 0:
                return self.mod(a[1], n)
            if a[0] == "mod" and a[2] % n == 0:
                return self.mod(a[1], n)
        return ("mod", a, n)

    def index_ids(self, a: Index) -> frozenset[int]:
        """Indices named in an index argument."""
        if a is None:
            return frozenset()
        if isinstance(a, int):
            return frozenset((a,))
        if a[0] == "k":
            return frozenset()
        if a[0] == "cat":
            return self.index_ids(a[1]) | self.index_ids(a[2])
        return self.index_ids(a[1])

    def subst_index(self, a: Index, to: Mapping[int, Index]) -> Index:
        """The argument with indices replaced."""
        if a is None:
            return None
        if isinstance(a, int):
            return to.get(a, a)
        if a[0] == "k":
            return a
        if a[0] == "cat":
            return self.cat(
                self.subst_index(a[1], to), self.subst_index(a[2], to), a[3]
            )
        if a[0] == "aff":
            return self.affine(self.subst_index(a[1], to), a[2], a[3])
        make = self.div if a[0] == "div" else self.mod
        return make(self.subst_index(a[1], to), a[2])


def _block(lo: int, hi: int, n: int) -> int | None:
    """The quotient by n of all numbers from lo to hi; None if they have several.

    That of a symbolic n is known only if it is 0 for the least n.
    """
    least, most = _jax.size_range(n)
    if least != most:
        return 0 if lo >= 0 and hi < least else None
    return lo // n if lo // n == hi // n else None
