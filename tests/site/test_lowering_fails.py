"""A kernel that cannot be lowered costs its site, and not the program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.errors import RewriterWarning
from rewriter.ops.kernel import Kernel
from rewriter.ops.registry import registry
from tests.support.programs import FORCED, block, inputs


def broken(monkeypatch: pytest.MonkeyPatch, op: str, where: str) -> None:
    """Makes a kernel fail where it is lowered, in the middle of what it writes."""
    real = registry().kernel(op, "memory_bounded")

    def fails(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, jax.jit(_fails_when_lowered), jnp.sin, x)

    def forward(**given: Any) -> Any:
        out, saved = real.forward(**given)
        return fails(out) if where == "forward" else out, saved

    def backward(**given: Any) -> Any:
        grads = dict(real.backward(**given))
        first = next(n for n, g in grads.items() if g is not None)
        return {**grads, first: fails(grads[first])} if where == "backward" else grads

    made = dataclasses.replace(real, forward=forward, backward=backward)
    kernels = registry().kernels
    monkeypatch.setattr(
        type(registry()),
        "kernels",
        lambda self, name: tuple(
            made if k.name == real.name and name == op else k for k in kernels(name)
        ),
    )


unlowered_p = jax.extend.core.Primitive("unlowered")
unlowered_p.def_abstract_eval(lambda x: x)


def _fails_when_lowered(x: Any) -> Any:
    return unlowered_p.bind(jnp.sin(x))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_the_others_stay(op: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    loss = jax.value_and_grad(lambda p, x: (block(p, x) ** 2).sum(), (0, 1))
    broken(monkeypatch, op, where)
    fast = rewriter.optimize(loss, implementation=FORCED)
    with pytest.warns(RewriterWarning, match=f"{op}: 'memory_bounded' cannot be low"):
        got = fast(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        got,
        jax.jit(loss)(*args),
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_report_says_it_once_it_is_known(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs()
    loss = jax.value_and_grad(lambda p, x: (block(p, x) ** 2).sum(), (0, 1))
    broken(monkeypatch, "attention", where)
    fast = rewriter.optimize(loss, implementation=FORCED)
    before = fast.report(*args)
    assert all(s.replaced for s in before.sites)
    with pytest.warns(RewriterWarning, match="cannot be lowered"):
        fast(*args)
    for report in (fast.report(*args), fast.report()):
        for site in report.sites:
            if site.op != "attention":
                assert site.replaced
                assert not any("lowered" in why for _, why in site.not_chosen)
                continue
            assert site.replaced == (where == "backward")
            name, why = site.not_chosen[0]
            assert name.startswith("memory_bounded")
            assert ("gradient" in name) == (where == "backward")
            assert why.startswith("it cannot be lowered for cpu: ")
            assert "unlowered" in why
        assert "cannot be lowered for cpu" in report.text()


def only_here(name: str, forward: Any) -> Kernel:
    """A kernel of RMS norm for this platform alone, with the reference's gradient."""
    real = registry().kernel("rms_norm", "memory_bounded")
    return dataclasses.replace(
        real, name=name, platforms=("cpu",), forward=forward, backward=None
    )


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize("around", ["nothing", "vmap", "scan", "grad", "jit"])
def test_explain_lowers_what_it_promises(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*, x: Any, residuals: bool = False, **given: Any) -> Any:
        del residuals, given
        return _fails_when_lowered(x)

    made = only_here("unlowered_kernel", forward)
    found = registry().kernels("rms_norm")
    monkeypatch.setattr(type(registry()), "kernels", lambda self, name: (made, *found))
    x, scale = np.ones((4, 16), np.float32), np.ones(16, np.float32)
    fn = {
        "nothing": norm,
        "vmap": jax.vmap(norm, (0, None)),
        "scan": lambda x, s: jax.lax.scan(lambda c, _: (norm(c, s), c), x, None, 3),
        "grad": jax.value_and_grad(lambda x, s: norm(x, s).sum()),
        "jit": jax.jit(norm),
    }[around]
    asked = rewriter.explain(fn, implementation={"rms_norm": "unlowered_kernel"})
    with pytest.warns(RewriterWarning, match="cannot be lowered for cpu"):
        report = asked(x, scale)
    (site,) = report.sites
    assert site.kernel == "xla"
    assert not site.replaced
    assert "unlowered_kernel" in dict(site.not_chosen)
    assert "it cannot be lowered for cpu: " in report.why_not("rms_norm")


def test_explain_lowers_no_kernel_for_another_platform() -> None:
    """A kernel for a chip that is not here is promised as before."""
    report = rewriter.explain(norm, target="tpu_v5e")(
        np.ones((512, 1024), np.float32), np.ones(1024, np.float32)
    )
    assert not any("lowered" in why for s in report.sites for _, why in s.not_chosen)
