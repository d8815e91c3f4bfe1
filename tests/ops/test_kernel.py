"""A kernel's records: their fields may be given, changed and read by themselves."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import pickle
from typing import Any

import pytest

from rewriter.ops.kernel import RECORD_OF, Kernel, Limits, Speed, Traits, takes_all
from rewriter.ops.registry import package_of, registry
from rewriter.support.verdict import Verdict, no


def doubled(*, x: Any) -> Any:
    return x + x


def refused(spec: Any) -> Verdict:
    return no("never", "it takes nothing")


MADE = Kernel(
    "by_adding", "double", ("cpu",), 1, forward=doubled,
    limits=Limits(supports=refused), traits=Traits(memory_bounded=True, adds_to="x"),
)  # fmt: skip
FLAT = Kernel(
    name="by_adding", op="double", platforms=("cpu",), version=1, supports=refused,
    forward=doubled, memory_bounded=True, adds_to="x",
)  # fmt: skip


def test_single_fields_are_sorted_into_records() -> None:
    assert (FLAT.limits, FLAT.speed, FLAT.traits) == (MADE.limits, Speed(), MADE.traits)
    for name, record in RECORD_OF.items():
        assert getattr(FLAT, name) is getattr(getattr(FLAT, record), name)
    fields = {f.name for f in dataclasses.fields(Kernel)}
    assert not fields & RECORD_OF.keys()


def test_single_fields_are_replaced() -> None:
    changed = dataclasses.replace(MADE, adds_to="", supports=takes_all)
    assert changed.traits == Traits(memory_bounded=True)
    assert changed.limits == Limits()
    assert MADE.traits.adds_to == "x"


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="a kernel has no field 'merge'"):
        dataclasses.replace(MADE, merge=True)
    with pytest.raises(AttributeError, match="a kernel has no field 'merge'"):
        _ = MADE.merge


def test_pickles() -> None:
    """Also those of a kernel that had no records, whose state is single fields."""
    again = pickle.loads(pickle.dumps(MADE))
    old = Kernel.__new__(Kernel)
    old.__setstate__(
        {"name": "by_adding", "op": "double", "platforms": ("cpu",), "version": 1,
         "supports": refused, "forward": doubled, "backward": None,
         "memory_bounded": True, "adds_to": "x"}
    )  # fmt: skip
    for kernel in (again, old):
        assert kernel.forward is doubled
        assert (kernel.limits, kernel.traits) == (MADE.limits, MADE.traits)


def kernels_of(module: Any) -> tuple[Kernel, ...]:
    """The kernels of a module: its ``KERNELS``, one for an op, or its ``KERNEL``."""
    if "KERNELS" not in vars(module):
        return (module.KERNEL,) if hasattr(module, "KERNEL") else ()
    assert len({k.op for k in module.KERNELS}) == len(module.KERNELS)
    return module.KERNELS


@pytest.mark.parametrize("op", registry().ops())
def test_each_module_of_an_op_exports_one_kernel(op: str) -> None:
    """`KERNELS` are those of the modules in the op's folder, and no others."""
    package = importlib.import_module(package_of(op))
    assert package.__file__
    folder = pathlib.Path(package.__file__).parent
    inside = {p.parent if p.stem == "__init__" else p for p in folder.rglob("*.py")}
    parts = [p.relative_to(folder).with_suffix("").parts for p in inside - {folder}]
    names = [".".join((package.__name__, *path)) for path in parts]
    modules = [importlib.import_module(name) for name in names]
    kernels = [k for m in modules for k in kernels_of(m)]
    which = lambda kernels: {(k.op, k.name, k.version) for k in kernels}
    assert which(kernels) == which(package.KERNELS)
    assert len(kernels) == len(package.KERNELS)
    assert registry().kernels(op) == tuple(k for k in package.KERNELS if k.op == op)
