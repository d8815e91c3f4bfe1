"""Computes one device's part of an op whose operands are passed around a ring.

The op's `Ring` says how. Each part is a site of its own, whose kernels save the
log-sum-exps by which results are merged. Gradients go around too. Second derivatives
are the reference's, on gathered operands; there is no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rewriter.errors import KernelError
from rewriter.ops.kernel import Kernel
from rewriter.ops.op import Op, Part, Ring
from rewriter.site import site
from rewriter.site.kernel_call import accepted, residual_slots
from rewriter.site.shards import Shards
from rewriter.site.uses import Use, shaped

Params = Mapping[str, Any]
Operands = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Around:
    """One use of an op on one of the devices of a ring.

    Attributes:
        op: The op.
        ring: How its operands are passed around.
        shards: How it is spread.
        names: The operands present, in the op's order.
        params: The op's parameters.
        kernels: (platform or ``"default"``, kernel); all save log-sum-exps.
    """

    op: Op
    ring: Ring
    shards: Shards
    names: tuple[str, ...]
    params: Params
    kernels: tuple[tuple[str, Kernel | None], ...]

    @property
    def devices(self) -> tuple[tuple[str, ...], int]:
        """The mesh axes of the ring, and its number of devices."""
        axes = self.shards.ring
        return axes, self.shards.parts(axes)

    # --------------------------------------------------------- one part of it
    def block(self, operands: Operands, params: Params) -> tuple[jax.Array, list[Any]]:
        """The op on one part, and the residuals of its kernels."""
        use, args = self._use(operands, params)
        out, *saved = site.site_p.bind(*args, use=use, batch=(), residuals=True)
        return out, saved

    def block_backward(
        self,
        operands: Operands,
        params: Params,
        out: jax.Array,
        lse: jax.Array,
        cotangent: jax.Array,
    ) -> dict[str, jax.Array]:
        """One part's contribution to the cotangents, from the result over all parts."""
        use, args = self._use(operands, params)
        saved = [
            lse.reshape(shape).astype(dtype)
            for slot in residual_slots(use, [shaped(a) for a in args])
            for shape, dtype in slot
        ]
        wrt = self.ring.moving
        grads = site.backward_p.bind(
            *args, out, *saved, cotangent, use=use, wrt=wrt, batch=(), summed=()
        )
        return dict(zip(wrt, grads, strict=True))

    def _use(self, operands: Operands, params: Params) -> tuple[Use, list[jax.Array]]:
        own = tuple(sorted(params.items()))
        use = Use(self.op, self.names, own, self.kernels)
        args = [operands[n] for n in self.names]
        shapes = [shaped(a) for a in args]
        for _, kernel in self.kernels:
            if kernel is None or len(accepted(use, kernel, shapes) or ()) != 1:
                raise KernelError(
                    f"a part of {self.op.name} cannot be merged",
                    wanted="a kernel that saves the log-sum-exps of its rows",
                )
        return use, args

    # ------------------------------------------------------------------ all of it
    def forward(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This device's part of the result, and the log-sum-exps of its rows."""
        operands = dict(zip(self.names, arrays, strict=True))
        axes, count = self.devices
        return self.ring.forward(operands, self.params, axes, count, self.block)

    def backward(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Cotangents of operands, from operands, result, log-sum-exps, cotangent."""
        *operands, out, lse, cotangent = arrays
        named = dict(zip(self.names, operands, strict=True))
        axes, count = self.devices
        grads = self.ring.backward(
            named, self.params, out, lse, cotangent, axes, count, self.block_backward
        )
        return tuple(grads[n] for n in self.ring.moving)

    def reference(self, *arrays: jax.Array) -> jax.Array:
        """The same by the op's reference, on gathered operands."""
        axes, count = self.devices
        operands = dict(zip(self.names, arrays, strict=True))
        for name in self.ring.passed:
            if name in operands:
                letters = [x.split("|")[0] for x in self.op.dims[name].split()]
                at = letters.index(self.ring.letter)
                operands[name] = jax.lax.all_gather(
                    operands[name], axes, axis=at, tiled=True
                )
        own, rule = self.params, self.op.spread(self.params)
        if rule is not None and rule.local is not None:
            parts = {self.ring.rows: Part(jax.lax.axis_index(axes), count)}
            operands, own = rule.local(operands, own, parts)
        plain = self.op.general or self.op.reference
        return plain(**operands, **own)

    def reference_backward(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Like `backward`, from operands and a cotangent."""
        *operands, cotangent = arrays
        return self._pulled(self.reference, operands)(cotangent)

    def _pulled(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """The pullback of a function of arrays along the moving operands."""
        at = [self.names.index(n) for n in self.ring.moving]

        def of(*chosen: jax.Array) -> Any:
            full = list(arrays)
            for i, x in zip(at, chosen, strict=True):
                full[i] = x
            return function(*full)

        return jax.vjp(of, *(arrays[i] for i in at))[1]


def passed_around(
    op: Op,
    shards: Shards,
    operands: Operands,
    params: Params,
    kernels: Sequence[tuple[str, Kernel | None]],
) -> jax.Array:
    """Returns one device's part of an op, inside the `jax.shard_map` over the mesh.

    Args:
        op: The op.
        shards: How it is split; its `passed` operands go around.
        operands: The device's parts, all varying over the same mesh axes.
        params: The op's parameters for the whole.
        kernels: (platform, kernel) pairs; every one of them saves log-sum-exps alone.
    """
    rule = op.spread(params)
    assert rule is not None
    assert rule.ring is not None
    names = op.ordered(operands)
    around = Around(op, rule.ring, shards, names, params, tuple(kernels))
    with jax.named_scope(f"rewriter/{op.name}"):
        return _differentiable(around)(*(operands[n] for n in names))[0]


def _differentiable(around: Around) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`Around.forward` with its gradient, and with the gradient of that."""
    names, moving = around.names, around.ring.moving

    def by_operand(grads: Sequence[jax.Array]) -> tuple[Any, ...]:
        found = dict(zip(moving, grads, strict=True))
        return tuple(found.get(n) for n in names)

    @jax.custom_vjp
    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return around.backward(*arrays)

    def gradients_forward(*arrays: jax.Array) -> Any:
        return gradients(*arrays), arrays

    def gradients_backward(arrays: Any, cotangents: Any) -> Any:
        *operands, out, lse, cotangent = arrays

        def of(*moved: jax.Array) -> Any:
            *chosen, cotangent = moved
            full = [*operands]
            for name, x in zip(moving, chosen, strict=True):
                full[names.index(name)] = x
            return around.reference_backward(*full, cotangent)

        points = [operands[names.index(n)] for n in moving]
        *grads, last = jax.vjp(of, *points, cotangent)[1](cotangents)
        # The forward's results depend on the operands alone.
        return *by_operand(grads), jnp.zeros_like(out), jnp.zeros_like(lse), last

    gradients.defvjp(gradients_forward, gradients_backward)

    @jax.custom_vjp
    def result(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return around.forward(*arrays)

    def forward(*arrays: jax.Array) -> Any:
        out, lse = (
            checkpoint_name(x, f"rewriter.{around.op.name}") for x in result(*arrays)
        )
        return (out, lse), (arrays, out, lse)

    def backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        arrays, out, lse = saved
        return by_operand(gradients(*arrays, out, lse, cotangents[0]))

    result.defvjp(forward, backward)
    return result
