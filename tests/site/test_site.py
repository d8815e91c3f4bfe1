"""Sites: one op under every transformation, and what each one costs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from rewriter import errors
from rewriter.ops.kernel import Kernel
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.site import site
from rewriter.support.verdict import no
from tests import slow
from tests.support import soft, transforms

NAMES = ("q", "k", "v", "bias", "lengths")
SITES = ("rewriter_site", "rewriter_site_tangent", "rewriter_site_backward")


def _operands(names: tuple[str, ...] = NAMES[:3], t: int = 3, s: int = 4) -> list[Any]:
    shapes = {"q": (2, t, 5), "k": (2, s, 5), "v": (2, s, 6), "bias": (1, t, s)}
    made = {
        n: jax.random.normal(jax.random.key(i), shape)
        for i, (n, shape) in enumerate(shapes.items())
    }
    made["lengths"] = jnp.array([2, s])
    return [made[n] for n in names]


def _bound(
    kernels: Any, names: tuple[str, ...] = NAMES[:3], op: Op = soft.OP
) -> Callable[..., jax.Array]:
    if isinstance(kernels, Kernel):
        kernels = (("default", kernels),)
    return lambda *args: site.bind(
        op, dict(zip(names, args, strict=True)), {"scale": 0.7}, kernels
    )


def _plain(names: tuple[str, ...] = NAMES[:3]) -> Callable[..., jax.Array]:
    return lambda *args: soft.reference(
        **dict(zip(names, args, strict=True)), scale=0.7
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _sites(function: Callable[..., Any], *args: Any) -> list[str]:
    jaxpr = jax.make_jaxpr(function)(*args)
    found = [e.primitive.name for e in _equations(jaxpr.jaxpr)]
    return [n.removeprefix("rewriter_") for n in found if n in SITES]


# ------------------------------------------------------- values, against float64
@pytest.mark.parametrize("transform", transforms.TRANSFORMS)
@pytest.mark.parametrize("names", slow.first(1, (NAMES, NAMES[:3])), ids=["all", "qkv"])
def test_every_transform_agrees_with_float64(
    names: tuple[str, ...], transform: str
) -> None:
    kernel, _ = soft.recording()
    site_fn, plain = _bound(kernel, names), _plain(names)
    transforms.check(transform, site_fn, plain, _operands(names))


@pytest.mark.parametrize("transform", transforms.LOW_PRECISION)
def test_bfloat16_is_as_accurate_as_the_reference(transform: str) -> None:
    kernel, _ = soft.recording()
    args = [a.astype(jnp.bfloat16) for a in _operands()]
    transforms.check(transform, _bound(kernel), _plain(), args)


@pytest.mark.parametrize("transform", ["jit", "hessian", "grad_of_vmap_first"])
@pytest.mark.parametrize("kernels", [(), (("default", "reference"),)])
def test_the_reference_is_a_kernel_too(kernels: Any, transform: str) -> None:
    transforms.check(transform, _bound(kernels), _plain(), _operands())


def test_a_kernel_without_backward_takes_the_references() -> None:
    kernel = Kernel(
        "forward_only", "soft", ("cpu",), 1,
        forward=lambda **operands: soft.reference(**operands),
    )  # fmt: skip
    transforms.check("jit_grad", _bound(kernel), _plain(), _operands())


@pytest.mark.parametrize(
    ("platforms", "grad", "kept_apart"),
    [
        (("cuda",), True, True),
        (("cuda",), False, False),
        (("cpu", "cuda"), True, False),
    ],
    ids=["for gradients", "forward alone", "in plain JAX"],
)
def test_what_loops_stack_of_a_gpu_kernel_is_no_part_of_it(
    platforms: tuple[str, ...], grad: bool, kept_apart: bool
) -> None:
    """Or XLA would run the kernel for the stack, and again for what reads it."""
    kernel = dataclasses.replace(soft.recording()[0], platforms=platforms)
    site_fn = _bound(kernel)

    def loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        turn = lambda q, _: (jnp.sin(site_fn(q, k, v)[..., :5]), None)
        return jax.lax.scan(turn, q, None, length=3)[0].sum()

    function = jax.jit(jax.grad(loop) if grad else loop)
    lowered = function.trace(*_operands()).lower(lowering_platforms=("cuda",))
    assert ("optimization_barrier" in lowered.as_text()) == kept_apart


def test_gradients_a_backward_leaves_out_come_from_the_reference() -> None:
    full, _ = soft.recording()
    kernel, _ = soft.recording(
        backward=lambda **given: {"q": full.backward(**given)["q"]}  # pyright: ignore
    )
    transforms.check("jit_grad", _bound(kernel), _plain(), _operands())


def test_third_derivatives() -> None:
    kernel, _ = soft.recording()
    q, k, v = _operands()

    def third(f: Callable[..., jax.Array]) -> Any:
        loss = lambda q: (f(q, k, v) ** 2).sum()
        along = lambda q: jax.jvp(jax.grad(loss), (q,), (jnp.ones_like(q),))[1].sum()
        return jax.grad(along)(q)

    with jax.enable_x64(True):
        q, k, v = (a.astype(jnp.float64) for a in (q, k, v))
        np.testing.assert_allclose(third(_bound(kernel)), third(_plain()), rtol=1e-9)


# ----------------------------------------------------------- what each one runs
def test_residuals_are_only_computed_when_differentiated() -> None:
    kernel, calls = soft.recording()
    args = _operands()
    jaxpr = jax.make_jaxpr(_bound(kernel))(*args)
    (eqn,) = (e for e in _equations(jaxpr.jaxpr) if e.primitive.name in SITES)
    assert len(eqn.outvars) == 1
    calls.clear()
    jax.jit(lambda *a: _bound(kernel)(*a)).lower(*args)
    assert [c[3] for c in calls] == [False]
    assert _sites(_bound(kernel), *args) == ["site"]


def test_reverse_mode_runs_the_fused_backward_and_holds_no_scores() -> None:
    kernel, calls = soft.recording()
    args = _operands(t=7, s=11)
    grad = jax.grad(lambda *a: (_bound(kernel)(*a) ** 2).sum(), (0, 1, 2))
    assert _sites(grad, *args) == ["site", "site_backward"]
    calls.clear()
    jax.jit(grad).lower(*args)
    assert [c[0] for c in calls].count("backward") == 1
    for function in (grad, lambda *a: jax.vjp(_bound(kernel), *a)[1]):
        jaxpr = jax.make_jaxpr(function)(*args)
        for eqn in _equations(jaxpr.jaxpr):
            assert all(v.aval.shape[-2:] != (7, 11) for v in eqn.outvars)


def test_linearize_holds_no_scores() -> None:
    kernel, _ = soft.recording()
    args = _operands(t=7, s=11)
    _, along = jax.linearize(_bound(kernel), *args)
    assert all(leaf.shape[-2:] != (7, 11) for leaf in jax.tree.leaves(along))


def test_the_result_is_kept_only_for_kernels_that_read_it() -> None:
    q, k, v = _operands()
    for saves_out in (True, False):
        kernel, _ = soft.recording(saves_out=saves_out)
        f = _bound(kernel)
        _, back = jax.eval_shape(lambda *a, f=f: jax.vjp(f, *a), q, k, v)
        shapes = [leaf.shape for leaf in jax.tree.leaves(back)]
        assert ((2, 3, 6) in shapes) == saves_out


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (None, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.dots_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("rewriter.soft"), 1),
    ],
)
def test_remat_policies_see_the_names(policy: Any, forwards: int) -> None:
    kernel, _ = soft.recording()
    inner = jax.checkpoint(
        lambda q, k, v: _bound(kernel)(jnp.sin(q), k, v) ** 2, policy=policy
    )
    grad = jax.grad(lambda *a: inner(*a).sum())
    found = _sites(grad, *_operands())
    assert (found.count("site"), found.count("site_backward")) == (forwards, 1)


def test_a_name_policy_saves_the_result_and_the_residual(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernel, _ = soft.recording()
    policy = jax.checkpoint_policies.save_only_these_names("rewriter.soft")
    inner = jax.checkpoint(
        lambda q, k, v: _bound(kernel)(jnp.sin(q), k, v) ** 2, policy=policy
    )
    print_saved_residuals(inner, *_operands())
    assert capsys.readouterr().out.count("rewriter.soft") == 2


def test_equal_sites_are_traced_and_lowered_once() -> None:
    kernel, calls = soft.recording()
    f = _bound(kernel)
    _, k, v = _operands()
    v = v[..., :5]

    def chain(q: jax.Array) -> jax.Array:
        for _ in range(4):
            q = f(q, k, v)
        return q

    text = jax.jit(chain).lower(_operands()[0]).as_text()
    assert text.count("func.func private @rewriter_site_soft") == 1
    assert len(calls) == 2  # once for its shapes, once to be lowered


def test_without_jit_sites_run_step_by_step() -> None:
    kernel, calls = soft.recording()
    grad = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum())
    wanted = grad(_plain())(*_operands())
    calls.clear()
    with jax.disable_jit():
        got = grad(_bound(kernel))(*_operands())
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert calls[-1][0] == "backward"


@pytest.mark.parametrize("batched", [False, True])
def test_values_are_linear_without_a_derivative(batched: bool) -> None:
    q, k, v = _operands()
    many = lambda f: jax.vmap(f) if batched else f
    v = jnp.stack([v, 2 * v]) if batched else v
    kernel, _ = soft.recording()
    both = _bound(kernel), _plain()
    bound, plain = (many(lambda v, f=f: f(q, k, v)) for f in both)
    up = jnp.cos(jnp.arange(plain(v).size, dtype=v.dtype)).reshape(plain(v).shape)
    for function in (bound, jax.jit(bound)):
        (got,) = jax.linear_transpose(function, v)(up)
        np.testing.assert_allclose(
            got, jax.vjp(plain, v)[1](up)[0], rtol=1e-5, atol=1e-6
        )


def test_empty_arrays() -> None:
    kernel, _ = soft.recording()
    q, k, v = _operands()
    out = jax.vmap(_bound(kernel))(*(jnp.zeros((0, *a.shape)) for a in (q, k, v)))
    assert out.shape == (0, 2, 3, 6)
    assert _bound(kernel)(q[:0], k[:0], v[:0]).shape == (0, 3, 6)


def test_profiles_show_the_label() -> None:
    kernel, _ = soft.recording()
    args = dict(zip(NAMES, _operands(), strict=False))
    function = jax.jit(
        lambda a: site.bind(soft.OP, a, {}, (("default", kernel),), label="soft#3")
    )
    assert "rewriter/soft#3" in function.lower(args).compile().as_text()


# --------------------------------------------------------------------- batching
def _batched(names: tuple[str, ...], batched: str) -> tuple[list[Any], list[Any]]:
    axes = [0 if n in batched.split() else None for n in names]
    args = [
        jnp.stack([a, a, a]) if axis == 0 else a
        for a, axis in zip(_operands(names, t=13, s=17), axes, strict=True)
    ]
    return axes, args


@pytest.mark.parametrize(
    ("names", "batched", "seen"),
    [
        (NAMES[:3], "q k v", (6, 13, 5)),  # merged
        (NAMES, "q k v", (6, 13, 5)),  # a shared bias stays, short lengths are copied
        (NAMES, "q k v bias lengths", (2, 13, 5)),  # a bias per element: vmapped
        (NAMES[:3], "q", (2, 13, 5)),  # keys are not copied
        (NAMES[:3], "k v", (2, 13, 5)),
    ],
)
def test_batch_axes_merge_where_it_is_cheap(
    names: tuple[str, ...], batched: str, seen: tuple[int, ...]
) -> None:
    kernel, calls = soft.recording()
    f = _bound(kernel, names)
    axes, args = _batched(names, batched)
    loss = lambda *a: (jax.vmap(f, axes)(*a) ** 2).sum()
    floats = tuple(i for i, n in enumerate(names) if n != "lengths")
    jax.jit(jax.grad(loss, floats)).lower(*args)
    assert calls[-1][:2] == ("backward", seen)
    assert all(c[1] in ((2, 13, 5), seen) for c in calls)


def test_the_gradient_of_a_shared_operand_is_summed_inside() -> None:
    kernel, _ = soft.recording()
    axes, args = _batched(NAMES, "q k v")
    f = jax.vmap(_bound(kernel, NAMES), axes)
    grad = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 3))
    jaxpr = jax.make_jaxpr(grad)(*args)
    (eqn,) = (
        e for e in _equations(jaxpr.jaxpr) if e.primitive is site.backward_p
    )  # fmt: skip
    assert [v.aval.shape for v in eqn.outvars] == [(3, 2, 13, 5), (1, 13, 17)]


def test_shared_weights_get_one_gradient_not_one_per_example() -> None:
    op = registry().op("gated_linear_unit")
    x, w = jnp.ones((64, 3, 4)), jnp.ones((4, 5)) / 3

    def loss(x: jax.Array, w: jax.Array, kernels: Any) -> jax.Array:
        one = lambda x: site.bind(op, {"x": x, "w_gate": w, "w_up": w}, {}, kernels)
        return (jax.vmap(one)(x) ** 2).sum()

    for kernels in ((), (("default", "memory_bounded"),)):
        grad = jax.jit(jax.grad(lambda w, ks=kernels: loss(x, w, ks)))
        text = grad.lower(w).as_text()
        assert "64x4x5" not in text


# -------------------------------------------------------------------- platforms
def test_each_platform_gets_its_kernel() -> None:
    cpu, cpu_calls = soft.recording("for_cpu")
    tpu, tpu_calls = soft.recording("for_tpu")
    f = jax.jit(_bound((("cpu", cpu), ("tpu", tpu))))
    args = _operands()
    traced = f.trace(*args)
    cpu_calls.clear()
    tpu_calls.clear()
    traced.lower(lowering_platforms=("tpu",))
    assert (len(cpu_calls), len(tpu_calls)) == (0, 1)
    traced.lower(lowering_platforms=("cpu",))
    assert (len(cpu_calls), len(tpu_calls)) == (1, 1)
    traced.lower(lowering_platforms=("cuda",))  # not listed: the reference
    assert (len(cpu_calls), len(tpu_calls)) == (1, 1)


def test_gpu_means_cuda_and_rocm_and_default_the_rest() -> None:
    gpu, gpu_calls = soft.recording("for_gpu")
    rest, rest_calls = soft.recording("rest")
    traced = jax.jit(_bound((("gpu", gpu), ("default", rest)))).trace(*_operands())
    gpu_calls.clear()
    rest_calls.clear()
    for platform in ("cuda", "rocm", "tpu"):
        traced.lower(lowering_platforms=(platform,))
    assert (len(gpu_calls), len(rest_calls)) == (2, 1)


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("symbolic", [False, True])
def test_one_artifact_for_three_platforms_keeps_gradients(
    symbolic: bool, differentiated: bool
) -> None:
    one, _ = soft.recording("one")
    two, _ = soft.recording("two", extra=True)  # saves something else
    kernels = (("cpu", one), ("cuda", two))
    run = lambda f: (
        jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)) if differentiated else f
    )
    args = _operands()
    (b,) = jax.export.symbolic_shape("b") if symbolic else (2,)
    specs = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in args]
    function = jax.jit(run(_bound(kernels)))
    made = jax.export.export(function, platforms=("cpu", "cuda", "tpu"))(*specs)
    loaded = jax.export.deserialize(made.serialize(vjp_order=1))
    wanted = run(_plain())
    for got, true in zip(
        *(jax.tree.leaves(f(*args)) for f in (loaded.call, wanted)), strict=True
    ):
        np.testing.assert_allclose(got, true, rtol=2e-5, atol=2e-6)
    square = lambda f: (
        lambda q: sum((x**2).sum() for x in jax.tree.leaves(f(q, *args[1:])))
    )
    got, true = (
        jax.grad(square(loaded.call))(args[0]),
        jax.grad(square(wanted))(args[0]),
    )
    np.testing.assert_allclose(got, true, rtol=2e-4, atol=2e-4)


def test_a_kernel_that_needs_sizes_gives_way_to_the_reference() -> None:
    def forward(*, q: Any, k: Any, v: Any, scale: float) -> jax.Array:
        blocks = range(q.shape[0])  # fails for a symbolic size
        out = [soft.reference(q=q[i:i + 1], k=k[i:i + 1], v=v[i:i + 1], scale=scale)
               for i in blocks]  # fmt: skip
        return jnp.concatenate(out)

    kernel = Kernel("by_rows", "soft", ("cpu",), 1, forward=forward)
    args = _operands()
    (b,) = jax.export.symbolic_shape("b")
    specs = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in args]
    made = jax.export.export(jax.jit(_bound(kernel)))(*specs)
    np.testing.assert_allclose(made.call(*args), _plain()(*args), rtol=1e-5)
    np.testing.assert_allclose(_bound(kernel)(*args), _plain()(*args), rtol=1e-5)


def test_a_kernel_that_refuses_the_shapes_gives_way_to_the_reference() -> None:
    kernel, calls = soft.recording(supports=lambda spec: no("test", "never"))
    transforms.check("jit_grad", _bound(kernel), _plain(), _operands())
    assert not calls


@pytest.mark.parametrize("script", ["sharded_sites.py"])
def test_sites_in_sharded_programs_on_two_devices(script: str) -> None:
    root = pathlib.Path(__file__).parents[2]
    flags = os.environ.get("XLA_FLAGS", "")
    env = {
        **os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
    }  # fmt: skip
    command = [sys.executable, str(root / "tests" / "support" / script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ wrong input
@pytest.mark.parametrize(
    ("forward", "got"),
    [
        (lambda q, k, v: v, r"float32\[2,4,6\]; expected float32\[2,3,6\]"),
        (lambda q, k, v: q[..., :1], r"float32\[2,3,1\]; expected float32\[2,3,6\]"),
        (
            lambda q, k, v: soft.reference(q=q, k=k, v=v).astype(jnp.bfloat16),
            r"bfloat16\[2,3,6\]; expected float32\[2,3,6\]",
        ),
        (lambda q, k, v: {"out": q}, "dict; expected"),
    ],
)
def test_a_wrong_result_names_kernel_and_line(forward: Any, got: str) -> None:
    def mistaken(*, q: Any, k: Any, v: Any, scale: float) -> Any:
        return forward(q, k, v)

    kernel = Kernel("mistaken", "soft", ("cpu",), 1, forward=mistaken)
    line = mistaken.__code__.co_firstlineno
    message = rf"test_site.py:{line}: kernel 'mistaken' of soft returned {got}"
    with pytest.raises(errors.KernelError, match=message):
        jax.eval_shape(_bound(kernel), *_operands())


def test_a_wrong_gradient_names_the_operand() -> None:
    kernel, _ = soft.recording(backward=lambda **given: {"k": given["q"]})
    grad = jax.grad(lambda *a: _bound(kernel)(*a).sum(), 1)
    message = r"'recording' of soft returned as the gradient of k float32\[2,3,5\]"
    with pytest.raises(errors.KernelError, match=message):
        jax.jit(grad)(*_operands())


def test_residuals_are_asked_of_a_kernel_with_a_backward() -> None:
    def forward(
        *, q: Any, k: Any, v: Any, scale: float, residuals: bool = False
    ) -> Any:
        return soft.reference(q=q, k=k, v=v, scale=scale)

    kernel = Kernel(
        "silent", "soft", ("cpu",), 1, forward=forward, backward=lambda **given: {}
    )
    with pytest.raises(errors.KernelError, match="since it has a backward"):
        _bound(kernel)(*_operands())


@pytest.mark.parametrize(
    ("operands", "params", "kernels", "error", "message"),
    [
        ("q k", {}, (), errors.KernelError, "expected also v"),
        ("q k v biass", {}, (), errors.KernelError, "Did you mean 'bias'"),
        ("q k v", {"scale": [1]}, (), errors.KernelError, "is a list"),
        ("q k v", {}, (("gpuu", "reference"),), errors.UnknownKernel, "'gpu'"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    operands: str, params: Any, kernels: Any, error: Any, message: str
) -> None:
    given = dict.fromkeys(operands.split(), jnp.ones((2, 3, 4)))
    with pytest.raises(error, match=message):
        site.bind(soft.OP, given, params, kernels)


def test_an_unknown_kernel_is_named_with_a_suggestion() -> None:
    op = registry().op("rms_norm")
    with pytest.raises(errors.UnknownKernel, match="Did you mean 'memory_bounded'"):
        site.bind(op, {"x": jnp.ones(3)}, {}, (("cpu", "memory_bound"),))
