"""Rows spread over the lanes of a team of warpgroups, in Pallas Mosaic GPU.

A warpgroup has an array of ``128 * vector`` columns, `vector` neighbours in each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import memref as memory

if TYPE_CHECKING:
    from jax import Array

Join = Callable[[Any, Any], Any]
"""Joins two numbers: their sum, or the larger one."""

LANES = 128
"""Lanes of a warpgroup: four warps of 32."""

LAST_NAMED = 15
"""The last of PTX's 16 named barriers. Mosaic uses 0 for a block and 1 to 8 for its
warpgroups. Teams use them from the last one down, so that only an eighth team of one
warpgroup shares its warpgroup's own barrier."""


def spread(width: int) -> Any:
    """Returns the layout of `width` columns in registers."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=width // LANES)


def loaded(reference: Any) -> Array:
    """Returns [128 * vector] of memory in registers, as float32."""
    return loaded_as_is(reference).astype(jnp.float32)


def loaded_as_is(reference: Any) -> Array:
    """Returns [128 * vector] of memory in registers, in its dtype."""
    width, dtype = reference.shape[0], reference.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((width,), dtype, layout=spread(width)),
    )
    def emit(context: Any, source: ir.Value) -> Any:
        del context
        place, kind, alignment = _of_lane(source)
        value = llvm.load(kind, place, alignment=alignment)
        layout = mgpu.WGStridedFragLayout((width,), width // LANES)
        registers = np.array([value], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )

    return emit(reference)


def store(reference: Any, value: Array, skipped: int = 0) -> None:
    """Writes registers, spread like `loaded` ones, to memory of the same dtype.

    Args:
        reference: [128 * vector] of memory.
        value: As many numbers.
        skipped: Columns at the front that are not written: a multiple of the vector.
    """

    @plgpu.inline_mgpu(arg_types=(spread(value.shape[0]), plgpu.RefType()))
    def emit(context: Any, value: Any, target: ir.Value) -> None:
        del context
        place, _, alignment = _of_lane(target)
        write = lambda: llvm.store(value.registers.item(), place, alignment=alignment)
        if not skipped:
            write()
            return
        with utils.when(_is_after(value, skipped)):
            write()

    emit(value, reference)


def without_first(value: Array, skipped: int) -> Array:
    """Returns float32 [128 * vector] with 0 in columns at the front.

    Args:
        value: The numbers, spread like `loaded` ones.
        skipped: How many columns become 0: a multiple of the vector.
    """
    layout = spread(value.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=layout),
    )
    def emit(context: Any, value: Any) -> Any:
        del context
        (register,) = value.registers.flat
        number = mgpu.c(0.0, ir.F32Type.get())
        zero = vector.broadcast(register.type, number)
        kept = arith.select(_is_after(value, skipped), register, zero)
        return mgpu.FragmentedArray(
            _registers=np.array([kept], dtype=object), _layout=value.layout,
            _is_signed=None,
        )  # fmt: skip

    return emit(value)


def _is_after(value: Any, skipped: int) -> ir.Value:
    """Whether a lane's columns are not among so many at the front."""
    lane = arith.andi(_thread(), _integer(LANES - 1))
    first = _integer(skipped * LANES // value.shape[0])
    return arith.cmpi(arith.CmpIPredicate.uge, lane, first)


def quotient(x: Array, divisor: Any) -> Array:
    """Returns float32 [width] divided by one number, as a division rounds it.

    The number's inverse is multiplied, and what that leaves is added. With the inverse
    rounded to the nearest, so is the quotient (Markstein, "Computation of elementary
    functions on the IBM RISC System/6000 processor", 1990, theorem 8.1), but for
    quotients below 2^-100. Both are scaled by a power of two where the number is tiny
    or huge. Where the rest is NaN, as for a divisor that is 0 or infinite, the product
    is what a division gives.
    """
    layout = spread(x.shape[0])
    number = jnp.asarray(divisor, jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def emit(context: Any, x: Any, divisor: Any) -> Any:
        del context
        f32 = ir.F32Type.get()
        scalar = divisor.registers.item()
        size = _of_scalar("abs.f32 $0, $1;", scalar)
        tiny = arith.cmpf(arith.CmpFPredicate.OLT, size, mgpu.c(2.0**-62, f32))
        huge = arith.cmpf(arith.CmpFPredicate.OGT, size, mgpu.c(2.0**62, f32))
        scale = arith.select(tiny, mgpu.c(2.0**64, f32), mgpu.c(1.0, f32))
        scale = arith.select(huge, mgpu.c(2.0**-64, f32), scale)
        scaled = arith.mulf(scalar, scale)
        inverse = _of_scalar("rcp.rn.f32 $0, $1;", scaled)
        text = (
            "{ .reg .f32 a, q, r, n; .reg .pred p; mul.rn.f32 a, $1, $2;"
            " mul.rn.f32 q, a, $3; neg.f32 n, $4; fma.rn.f32 r, n, q, a;"
            " fma.rn.f32 r, r, $3, q; testp.number.f32 p, r; selp.f32 $0, r, q, p; }"
        )

        def one(value: Any) -> Any:
            given = [value, scale, inverse, scaled]
            return llvm.inline_asm(f32, given, text, "=f,f,f,f,f")

        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            registers[at] = _by_number(one, register)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    return emit(x, number)


def nearest_whole(x: Array) -> Array:
    """Returns float32 [width] rounded to whole numbers, halves to even ones."""
    return _of_each("cvt.rni.f32.f32 $0, $1;", x)


def square_root(x: Array) -> Array:
    """Returns the square roots of float32 [width], or of one number, as rounded."""
    return _of_each("sqrt.rn.f32 $0, $1;", x)


def floor(x: Array) -> Array:
    """Returns the largest whole numbers that are not above float32 [width]."""
    return _of_each("cvt.rmi.f32.f32 $0, $1;", x)


def _of_each(text: str, x: Array) -> Array:
    """Returns what an instruction gives for each number; of one number, for that."""
    layout = spread(x.shape[0]) if x.shape else plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def emit(context: Any, x: Any) -> Any:
        del context
        one = lambda value: _of_scalar(text, value)
        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            vector = isinstance(register.type, ir.VectorType)
            registers[at] = _by_number(one, register) if vector else one(register)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=None
        )

    return emit(x)


TO_FLOATS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
"""Pairs of 8-bit floats, as conversions name them.

They stop at the largest number. So do XLA's on this GPU where they are fused with the
sums of a row. Elsewhere XLA gives NaN or an infinity for larger numbers."""


def store_floats(reference: Any, value: Array) -> None:
    """Writes float32 [width] to memory of 8-bit floats, rounded to the nearest."""
    name = TO_FLOATS[jnp.dtype(reference.dtype).name]
    text = (
        f"{{ .reg .b16 n; cvt.rn.satfinite.{name}.f32 n, $2, $1; cvt.u32.u16 $0, n; }}"
    )

    def converted(numbers: Sequence[ir.Value]) -> list[ir.Value]:
        made = []
        for i in range(0, len(numbers), 2):
            pair = [numbers[i], numbers[min(i + 1, len(numbers) - 1)]]
            both = llvm.inline_asm(_i32(), pair, text, "=r,f,f")
            made += [both, arith.shrui(both, _integer(8))]
        return made[: len(numbers)]

    _store_bytes(reference, value, converted)


def store_integers(
    reference: Any, value: Array, nearest: bool, ends: tuple[int, int] = (-128, 127)
) -> None:
    """Writes float32 [width] to memory of int8; NaN as 0.

    Args:
        reference: The memory.
        value: The numbers.
        nearest: Whether they are rounded to the nearest whole ones, halves to even
            ones, and not towards 0.
        ends: The least and the largest that are written.
    """
    text = (
        f"{{ .reg .s32 a; cvt.{'rni' if nearest else 'rzi'}.s32.f32 a, $1;"
        f" min.s32 a, a, {ends[1]}; max.s32 $0, a, {ends[0]}; }}"
    )
    one = lambda x: llvm.inline_asm(_i32(), [x], text, "=r,f")
    _store_bytes(reference, value, lambda numbers: [one(x) for x in numbers])


def _store_bytes(
    reference: Any,
    value: Array,
    converted: Callable[[Sequence[ir.Value]], Sequence[ir.Value]],
) -> None:
    """Writes the low bytes of what a lane's numbers are converted to."""

    @plgpu.inline_mgpu(arg_types=(spread(value.shape[0]), plgpu.RefType()))
    def emit(context: Any, value: Any, target: ir.Value) -> None:
        del context
        (register,) = value.registers.flat
        count, byte = ir.VectorType(register.type).shape[0], _byte()
        made = llvm.mlir_undef(ir.VectorType.get((count,), byte))
        for i, x in enumerate(converted([_element(register, i) for i in range(count)])):
            made = llvm.insertelement(made, arith.trunci(byte, x), _integer(i))
        start = utils.memref_ptr(target)
        start = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), start)
        lane = arith.andi(_thread(), _integer(LANES - 1))
        offset = arith.muli(lane, _integer(count))
        llvm.store(made, utils.getelementptr(start, [offset], byte), alignment=count)

    emit(value, reference)


def store_number(reference: Any, value: Any) -> None:
    """Writes one float32, the same in all lanes, by the first lane of a warpgroup."""
    number = jnp.asarray(value, jnp.float32)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, plgpu.RefType()))
    def emit(context: Any, value: Any, target: ir.Value) -> None:
        del context
        lane = arith.andi(_thread(), _integer(LANES - 1))
        start = utils.memref_ptr(target)
        start = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), start)
        text = "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p st.global.f32 [$0], $1; }"
        _assembly(text, "l,f,r,~{memory}", start, value.registers.item(), lane)

    emit(number, reference)


def zeros(width: int) -> Array:
    """Returns float32 [width] of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros((width,), jnp.float32), spread(width))


def wait_for_block() -> None:
    """Waits until all warpgroups of the block are here."""

    @plgpu.inline_mgpu()
    def emit(context: Any) -> None:
        del context
        _assembly("bar.sync 0;", "~{memory}")

    emit()


def row_sums(values: Sequence[Array], shared: Any, warpgroups: int) -> list[Array]:
    """Returns the sum of each array over all columns of a team: float32 scalars.

    All warpgroups of the team wait for each other once.

    Args:
        values: float32 [width] each; a power of two of them, 32 at most.
        shared: float32 [values, 4 * warpgroups] of shared memory. It must differ from
            the last call's, since a warp may still read that.
        warpgroups: Warpgroups of a team.
    """
    return _over_team(values, shared, warpgroups, arith.addf)


def row_maxima(values: Sequence[Array], shared: Any, warpgroups: int) -> list[Array]:
    """Returns the largest number of each array, NaN if one is, as `row_sums` does."""
    return _over_team(values, shared, warpgroups, arith.maximumf)


def _over_team(
    values: Sequence[Array], shared: Any, warpgroups: int, join: Join
) -> list[Array]:
    """Joins the numbers of each array over all columns of a team."""
    layout = spread(values[0].shape[0])
    number = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(
        arg_types=(*(layout for _ in values), plgpu.RefType()),
        return_type=tuple(number for _ in values),
    )
    def emit(context: Any, *given: Any) -> Any:
        del context
        *arrays, shared = given
        parts = [_over_registers(x, join) for x in arrays]
        _share(parts, shared, warpgroups, join)
        _wait_for_team(warpgroups)
        return tuple(_total(shared, i, join) for i in range(len(arrays)))

    return list(emit(*values, shared))


# --------------------------------------------------------------------- in a lane
def _of_lane(memory: ir.Value) -> tuple[ir.Value, ir.Type, int]:
    """Address, type and alignment of a lane's columns in [128 * vector] of memory.

    Compilers do not always find the alignment by themselves, and then load the columns
    one by one.
    """
    kind = ir.MemRefType(memory.type)
    vector = kind.shape[0] // LANES
    size = vector * utils.bytewidth(kind.element_type)
    lane = arith.andi(_thread(), _integer(LANES - 1))
    offset = arith.muli(lane, _integer(size))
    byte = ir.IntegerType.get_signless(8)
    start = utils.memref_ptr(memory)
    if not utils.is_smem_ref(memory):  # so that it is global memory, not generic
        start = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), start)
    place = utils.getelementptr(start, [offset], byte)
    return place, ir.VectorType.get((vector,), kind.element_type), min(size, 16)


def _over_registers(array: Any, join: Join) -> ir.Value:
    """A lane's columns of an array, joined: float32."""
    parts = []
    for register in array.registers.flat:
        size = ir.VectorType(register.type).shape[0]
        parts += [_element(register, i) for i in range(size)]
    return _joined(parts, join)


def _total(shared: ir.Value, index: int, join: Join) -> Any:
    """A row of shared memory, joined: the same number in all lanes."""
    width = ir.MemRefType(shared.type).shape[1]
    number = ir.F32Type.get()
    kind, start = ir.VectorType.get((4,), number), utils.memref_ptr(shared)
    parts = []
    for first in range(0, width, 4):
        place = utils.getelementptr(start, [index * width + first], number)
        four = llvm.load(kind, place, alignment=16)
        parts += [_element(four, i) for i in range(4)]
    return mgpu.FragmentedArray.splat(_joined(parts, join), (), is_signed=None)


def _joined(parts: list[ir.Value], join: Join) -> ir.Value:
    """Numbers joined to one, neighbours first."""
    while len(parts) > 1:
        paired = [join(a, b) for a, b in zip(parts[::2], parts[1::2])]  # noqa: B905
        parts = paired + parts[2 * len(paired) :]
    return parts[0]


def _element(value: ir.Value, index: int) -> ir.Value:
    place = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(value, dynamic_position=[], static_position=place)


# ------------------------------------------------------------------- over a warp
def _share(
    parts: list[ir.Value], shared: ir.Value, warpgroups: int, join: Join
) -> None:
    """Writes what `join` makes of several numbers over a warp: a column of `shared`.

    In each round, half of the lanes continue with one half of the numbers, the others
    with the other half. So n numbers take n - 1 exchanges and log2(32 / n) more, not 5
    n. Lanes with the same sum write the same value to the same place.
    """
    thread = _thread()
    distance, which = 16, _integer(0)
    while distance:
        bit = arith.andi(thread, _integer(distance))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, _integer(0))
        if len(parts) > 1:
            half = len(parts) // 2
            pairs = list(zip(parts[:half], parts[half:], strict=True))
            kept = [arith.select(upper, b, a) for a, b in pairs]
            sent = [arith.select(upper, a, b) for a, b in pairs]
            one = arith.extui(ir.IntegerType.get_signless(32), upper)
            which = arith.addi(arith.addi(which, which), one)
        else:
            kept = sent = parts
        got = [_exchanged(x, distance) for x in sent]
        parts = [join(a, b) for a, b in zip(kept, got, strict=True)]
        distance //= 2
    warp = arith.remui(arith.shrui(thread, _integer(5)), _integer(4 * warpgroups))
    index = ir.IndexType.get()
    place = [arith.index_cast(index, x) for x in (which, warp)]
    memory.store(parts[0], shared, place)


def _exchanged(value: ir.Value, distance: int) -> ir.Value:
    """The number in the lane at a distance from this one, in the same warp."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return llvm.inline_asm(value.type, [value], text, "=f,f", has_side_effects=True)


def _wait_for_team(warpgroups: int) -> None:
    """Waits until all warps of a team are here."""
    shift = _integer(7)
    team = arith.divui(arith.shrui(_thread(), shift), _integer(warpgroups))
    name = arith.subi(_integer(LAST_NAMED), team)
    text = f"bar.sync $0, {LANES * warpgroups};"
    _assembly(text, "r,~{memory}", name)


def _by_number(one: Callable[[Any], Any], register: ir.Value) -> ir.Value:
    """A register of what a function gives for each of its numbers."""
    made = llvm.mlir_undef(register.type)
    for i in range(ir.VectorType(register.type).shape[0]):
        made = llvm.insertelement(made, one(_element(register, i)), _integer(i))
    return made


def _of_scalar(text: str, value: ir.Value) -> ir.Value:
    """What an instruction from float32 to float32 gives."""
    return llvm.inline_asm(ir.F32Type.get(), [value], text, "=f,f")


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _byte() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def _thread() -> ir.Value:
    number = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(number, [], "mov.u32 $0, %tid.x;", "=r")


def _assembly(text: str, constraints: str, *given: ir.Value) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(given), text, constraints, has_side_effects=True)


def _integer(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))
