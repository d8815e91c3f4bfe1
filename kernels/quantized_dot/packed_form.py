"""The form of quantized dots whose numbers are packed in bytes, or in words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.ops.op import Op, Operand, Sharding
from rewriter.ops.packing import packing_of, unpacked

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.cost import Cost, Dtypes, Shapes

BYTES = {"forward": "p n", "transposed": "n p"}
"""The axes of bytes by mode, if they are packed along k."""


def packed_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of a quantized dot of packed numbers.

    Args:
        op: The quantized dot.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    assert op.cost is not None
    return dataclasses.replace(
        op,
        name=name,
        form_of=op.name,
        about=about,
        operands=tuple(map(_of_bytes, op.operands)),
        reference=functools.partial(computed, op.reference),
        defaults={**op.defaults, "packing": None, "codebook": None},
        cost=functools.partial(_cost, op.cost),
        sharding=functools.partial(_sharding, op),
        sample=functools.partial(_sample, op.sample),
    )


def _of_bytes(operand: Operand) -> Operand:
    if operand.name != "w":
        return operand
    doc = "int8 or uint8: two numbers of 4 bits each. [k/2, n] or [k, n/2]; [n, k/2] "
    doc += "or [n/2, k] transposed. int32 or uint32: eight numbers each, likewise."
    return dataclasses.replace(operand, axes="p n", doc=doc)


def axis_of(packing: str, mode: str) -> int:
    """Returns the axis of the matrix along which numbers are packed."""
    return int((packing_of(packing).axis == "n") != (mode == "transposed"))


def computed(
    product: Any, /, *, w: Array, packing: str, mode: str = "forward",
    codebook: tuple[float, ...] | None = None, **given: Any,
) -> Array:  # fmt: skip
    """Returns the product of rows and the matrix that bytes or words hold.

    Args:
        product: Computes a quantized dot.
        w: The bytes, or the words.
        packing: How numbers lie in them, see `packing_of`.
        mode: As in a quantized dot.
        codebook: 16 floats that stand for the numbers 0 to 15, or None.
        **given: Other operands and parameters of a quantized dot.
    """
    numbers = unpacked(w, packing_of(packing), axis_of(packing, mode))
    if codebook is not None:
        numbers = jnp.array(codebook, jnp.float32)[numbers]
    return product(w=numbers, mode=mode, **given)


def _sharding(op: Op, params: Mapping[str, Any]) -> Sharding:
    """How a use is split: by rows, and by columns unless those are packed."""
    rule, packing = op.spread(params), params["packing"]
    assert rule is not None
    by_columns = packing is not None and packing_of(packing).axis == "k"
    along = {"...", "n"} if by_columns else {"..."}
    dims = {**(rule.dims or {}), "w": BYTES[params["mode"]] if by_columns else "c d"}
    return dataclasses.replace(
        rule, along=frozenset(along), sums=frozenset(), dims=dims, follows={}
    )


def _cost(
    cost: Any,
    shapes: Shapes,
    dtypes: Dtypes,
    params: Mapping[str, Any],
    mode: str = "forward",
) -> Cost:
    """That of a matrix of int4."""
    axis = axis_of(params["packing"], params["mode"])
    own = list(shapes["w"])
    own[axis] *= packing_of(params["packing"]).count
    return cost({**shapes, "w": tuple(own)}, {**dtypes, "w": "int4"}, params, mode)


def _sample(
    sample: Any, key: Any, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Operands of a quantized dot, and any bytes or words."""
    made = dict(sample(key, operands, params))
    x = operands["w"]
    bits = jax.random.bits(key, x.shape, f"uint{8 * x.dtype.itemsize}")
    return {**made, "w": lax.bitcast_convert_type(bits, x.dtype)}
