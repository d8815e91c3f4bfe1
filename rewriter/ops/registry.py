"""Names of ops, kernels and patterns.

The ones shipped with the package are loaded when a name is first looked up;
a user's own are added explicitly and never replace others.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from rewriter import errors
from rewriter.kernels.index import ELEMENTWISE, OPS, ROWS
from rewriter.ops.kernel import Kernel
from rewriter.ops.op import Op
from rewriter.patterns.index import COUNTED, LOOK_ALIKES, PATTERNS
from rewriter.support.source_line import source_line

REFERENCE = "reference"
"""The name of every op's plain `jax.numpy` form."""


@dataclass
class Registry:
    """Ops, kernels and patterns by name.

    Attributes:
        builtin: Whether names not added are looked up in
            `rewriter.kernels.index` and `rewriter.patterns.index`.
        defaults: Patterns that a user added to the default set.
        changes: How often something was added that is not shipped.
    """

    builtin: bool = True
    _ops: dict[str, Op] = field(default_factory=dict)
    _kernels: dict[str, dict[str, Kernel]] = field(default_factory=dict)
    _patterns: dict[str, Any] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)
    changes: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # ------------------------------------------------------------- adding
    def add_op(self, op: Op) -> None:
        """Adds an op; adding the same object again does nothing.

        Raises:
            DuplicateName: If another op has its name.
        """
        with self._lock:
            other = self._ops.get(op.name) or self._shipped_op(op.name)
            if other is not None and other is not op:
                raise _duplicate(op.name, other.reference, op.reference)
            self._ops[op.name] = op
            self.changes += 1
            self._kernels.setdefault(op.name, {})

    def add_kernel(self, kernel: Kernel) -> None:
        """Adds a kernel to its op; adding the same object again does nothing.

        Raises:
            UnknownPattern: If there is no such op.
            DuplicateName: If the op has a kernel of that name.
        """
        with self._lock:
            self.op(kernel.op)
            kernels = self._kernels[kernel.op]
            other = kernels.get(kernel.name)
            if kernel.name == REFERENCE:
                raise errors.DuplicateName(
                    f"{REFERENCE!r} is every op's plain form",
                    next_step="Give the kernel another name",
                    where=kernel.where,
                )
            if other is not None and other is not kernel:
                raise _duplicate(kernel.name, other.forward, kernel.forward)
            kernels[kernel.name] = kernel
            self.changes += 1

    def add_pattern(self, name: str, pattern: Any) -> None:
        """Adds a pattern; adding the same object again does nothing.

        Raises:
            DuplicateName: If another pattern has that name.
        """
        with self._lock:
            other = self._patterns.get(name)
            if other is None and self.builtin and name in PATTERNS:
                other = _shipped_pattern(name)
            if other is not None and other is not pattern:
                raise _duplicate(name, other, pattern)
            self._patterns[name] = pattern
            self.changes += 1

    # ------------------------------------------------------------ looking up
    def op(self, name: str) -> Op:
        """Returns the op of a name.

        Raises:
            UnknownPattern: If there is none.
        """
        with self._lock:
            found = self._ops.get(name) or self._shipped_op(name)
        if found is None:
            raise errors.UnknownPattern(
                f"no op {name!r}",
                next_step=errors.known(name, self.ops()),
                where=errors.caller(),
            )
        return found

    def ops(self) -> tuple[str, ...]:
        """Returns the names of all ops, sorted; loads nothing."""
        shipped = OPS if self.builtin else ()
        return tuple(sorted({*self._ops, *shipped}))

    def counted(self) -> tuple[str, ...]:
        """Returns the shipped ops that a report counts even where there is none."""
        return COUNTED if self.builtin else ()

    def kernel(self, op: str, name: str) -> Kernel | None:
        """Returns a kernel of an op, or ``None`` for its reference.

        Raises:
            UnknownPattern: If there is no such op.
            UnknownKernel: If the op has no such kernel.
        """
        if name == REFERENCE:
            return None
        self.op(op)
        found = self._kernels[op].get(name)
        if found is None:
            raise errors.UnknownKernel(
                f"{op} has no kernel {name!r}",
                next_step=errors.known(name, [*self._kernels[op], REFERENCE]),
                where=errors.caller(),
            )
        return found

    def kernels(self, op: str) -> tuple[Kernel, ...]:
        """Returns the kernels of an op, first added first.

        Raises:
            UnknownPattern: If there is no such op.
        """
        self.op(op)
        return tuple(self._kernels[op].values())

    def pattern(self, name: str) -> Any:
        """Returns the pattern of a name.

        Raises:
            UnknownPattern: If there is none.
        """
        with self._lock:
            if name not in self._patterns:
                if not self.builtin or name not in PATTERNS:
                    raise errors.UnknownPattern(
                        f"no pattern {name!r}",
                        next_step=errors.known(name, self.patterns()),
                        where=errors.caller(),
                    )
                self._patterns[name] = _shipped_pattern(name)
            return self._patterns[name]

    def add_default(self, name: str) -> None:
        """Adds a registered pattern to the default set."""
        with self._lock:
            self.pattern(name)
            if name not in self.defaults:
                self.defaults.append(name)
                self.changes += 1

    def patterns(self) -> tuple[str, ...]:
        """Returns the names of all patterns, sorted; loads nothing."""
        shipped = PATTERNS if self.builtin else ()
        return tuple(sorted({*self._patterns, *shipped}))

    def _shipped_op(self, name: str) -> Op | None:
        if not self.builtin or name not in OPS:
            return None
        module = importlib.import_module(package_of(name))
        (found,) = (op for op in _ops_of(module) if op.name == name)
        self._ops[name] = found
        kernels = self._kernels.setdefault(name, {})
        kernels.update((k.name, k) for k in module.KERNELS if k.op == name)
        return found


@functools.cache
def registry() -> Registry:
    """Returns the registry of this process, made on first use."""
    return Registry()


def package_of(op: str) -> str:
    """Returns the package of an op's kernels.

    Raises:
        ModuleNotFoundError: If the op is not one of the package's.

    Example:
        >>> package_of("attention")
        'rewriter.kernels.attention'
    """
    if op not in OPS:
        raise ModuleNotFoundError(f"no package of kernels for {op!r}")
    return f"rewriter.kernels.{OPS[op]}"


def _ops_of(package: ModuleType) -> tuple[Op, ...]:
    """The ops of a package: its ``OPS``, or its only ``OP``."""
    return package.OPS if hasattr(package, "OPS") else (package.OP,)


def _shipped_pattern(name: str) -> Any:
    entry = PATTERNS[name]
    module = importlib.import_module(f"rewriter.patterns.{entry.module}")
    return getattr(module, entry.attribute)


def _duplicate(name: str, first: Any, second: Any) -> errors.DuplicateName:
    places = [
        getattr(x, "where", "") or source_line(x) or repr(x) for x in (first, second)
    ]
    return errors.DuplicateName(
        f"{name!r} defined at {places[0]} and {places[1]}",
        next_step="Give one of them another name",
    )


def look_alikes() -> Callable[[Any], Iterator[Any]]:
    """Returns the function of a graph to words about what no pattern finds in it."""
    return importlib.import_module(f"rewriter.patterns.{LOOK_ALIKES}").look_alikes


def row_kernel() -> Any:
    """Returns the kernel of programs of rows; see `rewriter.ops.row_program`."""
    return importlib.import_module(f"rewriter.kernels.{ROWS}").KERNEL


def elementwise_kernel() -> Any:
    """Returns the kernel of elementwise functions; see `elementwise_program`."""
    return importlib.import_module(f"rewriter.kernels.{ELEMENTWISE}").KERNEL
