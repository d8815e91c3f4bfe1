"""Programs of arrays of few bits by their names, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

Function = Callable[..., Any]


@dataclass(frozen=True)
class Spelled:
    """Programs, and the arguments that they name.

    Attributes:
        given: Arguments by their names in programs.
        spellings: What is to be read off each program, and the program.
        alike: Programs in which nothing of the kind may be found.
    """

    given: Mapping[str, Any]
    spellings: dict[str, tuple[Any, Function]] = field(default_factory=dict)
    alike: dict[str, Function] = field(default_factory=dict)

    def spelling(self, want: Any) -> Callable[[Function], Function]:
        """Keeps a program, and what is to be read off it."""

        def keep(f: Function) -> Function:
            self.spellings[f.__name__] = want, f
            return f

        return keep

    def look_alike(self, f: Function) -> Function:
        """Keeps a program in which nothing of the kind may be found."""
        self.alike[f.__name__] = f
        return f

    def args_of(self, f: Function) -> list[Any]:
        """Returns the arguments that a program names."""
        names = f.__code__.co_varnames[: f.__code__.co_argcount]
        return [jax.device_put(np.asarray(self.given[name])) for name in names]

    def programs(self, names: Iterable[str] | None = None) -> dict[str, Function]:
        """Returns spellings by name, all of them by default."""
        every = {n: f for n, (_, f) in self.spellings.items()}
        return every if names is None else {n: every[n] for n in names}

    def both(
        self, programs: Mapping[str, Function], **options: Any
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yields each program's name, its result as written, and as rewritten.

        All are compiled together.
        """
        args = {n: self.args_of(f) for n, f in programs.items()}
        fast = {n: rewriter.optimize(f, **options) for n, f in programs.items()}

        @jax.jit
        def every() -> Any:
            return {n: (f(*args[n]), fast[n](*args[n])) for n, f in programs.items()}

        for name, (plain, got) in every().items():
            assert plain.dtype == got.dtype, name
            yield name, plain, got

    def assert_the_same(self, programs: Mapping[str, Function], **options: Any) -> None:
        """Asserts that rewritten programs give the same numbers, bit by bit."""
        for name, want, got in self.both(programs, **options):
            a, b = (np.asarray(x, "f8") for x in (got, want))
            np.testing.assert_array_equal(a, b, err_msg=name)

    def assert_packed(self, name: str, forced: Mapping[str, Any]) -> dict[str, Any]:
        """Asserts that a program is one packed dot; returns the dot's parameters.

        Args:
            name: The spelling, for which the packing is to be read.
            forced: Names the kernel.
        """
        want, f = self.spellings[name]
        report = rewriter.explain(f, implementation=forced)(*self.args_of(f))
        assert not report.failures
        (site,) = report.sites
        assert (site.form, site.kernel) == ("packed_dot", "memory_bounded"), report
        assert site.params["packing"] == want
        return dict(site.params)

    def assert_as_near(
        self, names: Iterable[str] | None, implementation: Mapping[str, Any]
    ) -> None:
        """Asserts that no result is further from float64 than twice the program's."""
        programs = self.programs(names)
        how = {"implementation": implementation, "strict": True}
        for name, *results in self.both(programs, **how):
            want = in_float64(programs[name], self.args_of(programs[name]))
            errors = [np.abs(np.asarray(y, "f8") - want).max() for y in results]
            most = 2 * errors[0] + 1e-6 * np.abs(want).max()
            assert errors[1] <= most, (name, errors)

    def assert_same_gradients(
        self, name: str, wanted: tuple[int, ...], implementation: Mapping[str, Any]
    ) -> None:
        """Asserts gradients outside of a rewritten program, and within one."""
        f, how = self.spellings[name][1], {"implementation": implementation}
        args = self.args_of(f)

        def gradients(f: Function) -> Function:
            return jax.grad(lambda *args: jnp.square(f(*args)).sum(), wanted)

        want = gradients(f)(*args)
        outside = gradients(rewriter.optimize(f, **how))
        within = rewriter.optimize(gradients(f), **how)
        for got in (outside(*args), within(*args)):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


def in_float64(f: Function, args: list[Any]) -> np.ndarray:
    """Returns what a program gives without its roundings to ``BF`` and ``F32``."""
    given = [np.asarray(a) for a in args]
    given = [a.astype("f8") if a.dtype == np.float32 else a for a in given]
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        for name in ("BF", "F32"):
            patch.setitem(f.__globals__, name, jnp.float64)
        return np.asarray(f(*map(jnp.asarray, given)), "f8")
