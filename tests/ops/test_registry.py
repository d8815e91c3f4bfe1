"""Names: shipped ones load on first use, a user's never replace others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter import errors
from rewriter.ops.kernel import Kernel, from_function, spec_of
from rewriter.ops.op import Op, Operand
from rewriter.ops.registry import Registry, registry


def _op(name: str = "mine") -> Op:
    def double(*, x: jax.Array) -> jax.Array:
        return 2 * x

    return Op(name, (Operand("x", "d", True),), "d", double)


def _kernel(op: Op, name: str = "fast") -> Kernel:
    return Kernel(name, op.name, ("cpu",), 1, forward=lambda *, x: x + x)


def test_rewriting_for_a_cpu_does_not_load_pallas() -> None:
    code = (
        "import sys, jax, rewriter;"
        "from jax.numpy import ones;"
        "f = lambda x: jax.nn.softmax(x @ x.T) @ x;"
        "assert rewriter.explain(f)(ones((64, 64))).counts()['attention'] == 1;"
        "assert 'jax.experimental.pallas' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_importing_the_registry_loads_no_kernel() -> None:
    code = (
        "import sys, rewriter.ops.registry, rewriter.site.site;"
        "r = rewriter.ops.registry.registry(); r.ops();"
        "assert [m for m in sys.modules if m.startswith('rewriter.kernels.')]"
        " == ['rewriter.kernels.index'];"
        "r.op('rms_norm');"
        "assert 'rewriter.kernels.norms' in sys.modules;"
        "assert 'rewriter.kernels.attention' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "name",
    ["attention", "gated_linear_unit", "layer_norm", "ragged_dot",
     "ragged_gated_linear_unit", "rms_norm"],
)  # fmt: skip
def test_shipped_ops_are_whole(name: str) -> None:
    op = registry().op(name)
    assert op.name == name
    assert set(op.required) <= set(op.names)
    assert set(op.dims) == {*op.names, "out"}
    assert registry().kernels(name)
    assert {k.op for k in registry().kernels(name)} == {name}
    assert registry().kernel(name, "reference") is None


def test_an_added_op_and_kernel_are_found() -> None:
    names, op = Registry(), _op()
    kernel = _kernel(op)
    names.add_op(op)
    names.add_kernel(kernel)
    names.add_op(op)  # the same object: nothing happens
    names.add_kernel(kernel)
    assert names.op("mine") is op
    assert names.kernel("mine", "fast") is kernel
    assert names.kernels("mine") == (kernel,)
    assert "mine" in names.ops()
    assert "mine" not in registry().ops()


def test_two_definitions_of_one_name_are_refused_with_both_places() -> None:
    names = Registry()
    names.add_op(_op())
    places = r"'mine' defined at test_registry.py:\d+ and test_registry.py:\d+"
    with pytest.raises(errors.DuplicateName, match=places):
        names.add_op(_op())
    with pytest.raises(errors.DuplicateName, match=r"reference.py:\d+"):
        names.add_op(_op("rms_norm"))
    names.add_kernel(_kernel(_op()))
    with pytest.raises(errors.DuplicateName, match="'fast' defined at"):
        names.add_kernel(_kernel(_op()))
    with pytest.raises(errors.DuplicateName, match="plain form"):
        names.add_kernel(_kernel(_op(), "reference"))


def test_every_listed_pattern_is_one() -> None:
    for name in registry().patterns():
        assert registry().pattern(name).name == name


def test_patterns_are_found_by_name() -> None:
    names = Registry()
    pattern = object()
    names.add_pattern("mine", pattern)
    names.add_pattern("mine", pattern)
    assert names.pattern("mine") is pattern
    assert "mine" in names.patterns()
    assert not names.defaults
    names.add_default("mine")
    names.add_default("mine")
    assert list(names.defaults) == ["mine"]
    with pytest.raises(errors.UnknownPattern):
        names.add_default("mime")
    with pytest.raises(errors.DuplicateName):
        names.add_pattern("mine", object())


@pytest.mark.parametrize(
    ("look_up", "error", "hint"),
    [
        (lambda r: r.op("atention"), errors.UnknownPattern, "'attention'"),
        (lambda r: r.kernels("rmsnorm"), errors.UnknownPattern, "'rms_norm'"),
        (lambda r: r.pattern("mime"), errors.UnknownPattern, "'mine'"),
        (
            lambda r: r.kernel("rms_norm", "memory-bounded"), errors.UnknownKernel,
            "'memory_bounded'",
        ),
        (lambda r: r.kernel("nothing", "x"), errors.UnknownPattern, "Known: "),
        (lambda r: r.add_kernel(_kernel(_op("no"))), errors.UnknownPattern, "Known: "),
    ],
)  # fmt: skip
def test_unknown_names_come_with_a_suggestion(
    look_up: Any, error: type[Exception], hint: str
) -> None:
    names = Registry()
    names.add_pattern("mine", object())
    with pytest.raises(error, match=hint):
        look_up(names)


def test_a_plain_function_is_a_kernel() -> None:
    op = Op(
        "axpy",
        (Operand("x", "d", True), Operand("y", "d", True), Operand("z", "d")), "d",
        lambda *, x, y, z=None, a=1.0: a * x + y,
    )  # fmt: skip

    def fused(first: Any, second: Any, *, z: Any = None, a: float) -> Any:
        return a * first + second + (0 if z is None else z)

    kernel = from_function(fused, op)
    assert kernel.name == "fused"
    assert kernel.where.startswith("test_registry.py:")
    x = jnp.arange(3.0)
    assert kernel.forward(x=x, y=1, a=2.0, other=3).tolist() == [1, 3, 5]
    assert kernel.forward(x=x, y=1, z=1, a=2.0).tolist() == [2, 4, 6]


def test_a_spec_says_what_is_there() -> None:
    op = registry().op("rms_norm")
    operands = {"scale": jnp.ones(3), "x": jnp.ones((2, 3), jnp.bfloat16)}
    spec = spec_of(op, operands, {"eps": 1e-6})
    assert spec.operands == ("x", "scale")
    assert spec.shape("x") == (2, 3)
    assert spec.dtype("x") == "bfloat16"
    assert spec.param("eps") == 1e-6
    assert spec.param("out_dtype", 1) is None
    assert not spec.has("epsilon")
    assert not spec.symbolic
    assert spec == spec_of(op, operands, {"eps": 1e-6})
    assert hash(spec)


@pytest.mark.parametrize(
    ("dims", "parallel", "axis"),
    [
        ("b t n h", "b", (0, False)),
        ("t b|1 h", "b", (1, True)),
        ("... b h", "b", (-2, False)),
        ("... d", "...", (0, False)),
        ("d", "...", (None, False)),
        ("b t", "", (None, False)),
        ("", "b", (None, False)),
    ],
)
def test_axis_of_the_parallel_letter(dims: str, parallel: str, axis: Any) -> None:
    op = Op("o", (Operand("x", dims),), "", lambda *, x: x, parallel=parallel)
    assert op.axis("x") == axis
