"""What the Hopper kernels may be tuned by, what fits into an SM, what they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewriter.kernels import mosaic
from rewriter.kernels.ragged_dot import xla
from rewriter.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.device import Device
    from rewriter.kernel import Spec

HOPPER = ("H100", "H200", "GH200", "H800", "H20")
"""What names of Hopper GPUs contain."""

SHARED_MEMORY = 227 << 10
"""Bytes of shared memory that a block of threads may have on Hopper."""

BARRIERS = 1 << 10
"""Bytes for barriers."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM, H200 and GH200."""

STEP = 64
"""What is multiplied at once, along the axis that is summed: a row of 128 bytes."""

WARPGROUPS = 2
"""Warpgroups that compute; one more copies."""

REGISTERS = (232, 40)
"""Registers per lane for them and for it. All lanes of an SM have 512 x 128."""

STORED = 64 * mosaic.SWIZZLE
"""Bytes of the 64 rows that a warpgroup stores at once."""


@dataclass(frozen=True)
class Tiles:
    """The config of both passes.

    Attributes:
        block_m: Rows of a tile of the result; if the rows are what is summed, the
            columns of lhs that a tile has. Two warpgroups share 128 and 256 of them,
            and the columns of a tile of 64.
        block_n: Columns of a tile.
        stages: Parts of both operands, `STEP` deep, that shared memory holds.
        width: Rows of tiles that are computed together, column by column.
        behind: Whether a product may still run while the next one is prepared.
        apart: Whether each warpgroup has tiles of its own, so that one stores while
            the other multiplies.
        programs: Blocks of threads, which take one tile after the other.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    width: int = 8
    behind: bool = True
    apart: bool = False
    programs: int = PROCESSORS

    @property
    def by_columns(self) -> bool:
        """Whether the warpgroups share the columns of a tile, not its rows."""
        return self.block_m == 64 and not self.apart

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.apart else WARPGROUPS

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's part of a tile."""
        return self.block_m if self.by_columns else self.block_m // self.sharing

    @property
    def columns(self) -> int:
        """Columns of a warpgroup's part of a tile."""
        return self.block_n // self.sharing if self.by_columns else self.block_n

    @property
    def chunks(self) -> dict[str, tuple[int, int]]:
        """Warpgroups' parts of lhs and rhs, and 64 columns each of such a part.

        Where the rows are summed; a part that both warpgroups need is there once.
        """
        left, right = self.rows // 64, self.columns // 64
        if self.by_columns:
            return {"left": (1, left), "right": (self.sharing, right)}
        return {"left": (self.sharing, left), "right": (1, right)}

    def places(self, name: str) -> list[tuple[int, int]]:
        """Returns the places of 64 columns of ``"left"`` or ``"right"``, in order."""
        parts, each = self.chunks[name]
        return [(i, j) for i in range(parts) for j in range(each)]

    @property
    def copies(self) -> int:
        """How many copies of 64 columns a step takes where the rows are summed."""
        return (self.block_m + self.block_n) // 64

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        operands = 2 * STEP * self.stages * (self.block_m + self.block_n)
        return operands + 2 * WARPGROUPS * STORED + BARRIERS

    @property
    def registers(self) -> int:
        """Registers per lane for sums."""
        return self.rows * self.columns // 128


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the rule of thumb, by rows of a group.

    On an H200, 256 2048 1536 128 (m, k, n, g): 64 x 256 152 us, 128 x 256 164 us.
    From 64 rows a group on, 128 x 256 was the fastest or within 2 % of it.
    """
    del device
    if _mean(spec) <= 32 and spec.param("mode") != "contracting":
        return Tiles(64, 256)
    return Tiles()


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, the likeliest first."""
    del device
    made = [Tiles(width=4), Tiles(128, 128, 6, apart=True), Tiles(width=16)]
    if _mean(spec) <= 512 and spec.param("mode") != "contracting":
        made += [Tiles(128, 192), Tiles(64, 256), Tiles(64, 128, 6)]
    return made


def _mean(spec: Spec) -> int:
    return spec.shape("lhs")[0] // spec.shape("group_sizes")[0]


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, block sizes."""
    del spec
    found = [YES]
    if not any(name in device.kind for name in HOPPER):
        found.append(no("device", f"{device.kind} is not of the Hopper generation"))
    if config.block_m not in (64, 128, 256):
        found.append(no("block_m", f"{config.block_m} is not 64, 128 or 256"))
    if config.block_n % 64 or not 64 <= config.columns <= 256:
        text = f"{config.columns} columns a warpgroup, not 64 to 256 by 64"
        found.append(no("block_n", text))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    if config.registers > 128:
        found.append(no("registers", f"{config.registers} for sums, of at most 128"))
    if (size := config.shared_memory) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    return all_of(*found)


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernels take this use."""
    base = xla.supports(spec)
    if not base.ok:
        return base
    found = [mosaic.attached()]
    left, right = spec.dtype("lhs"), spec.dtype("rhs")
    if left not in ("bfloat16", "float16") or left != right:
        text = f"lhs is {left} and rhs {right}, not both bfloat16 or both float16"
        found.append(no("dtype", text))
    out = spec.param("out_dtype") or left
    if out not in (left, "float32"):
        found.append(no("out_dtype", f"the result is {out}, not {left} or float32"))
    k = spec.shape("lhs")[1]
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else -1]
    for name, size in (("k", k), ("n", n)):
        if size % STEP:
            found.append(no("alignment", f"{name} is {size}, no multiple of {STEP}"))
    if max(*spec.shape("lhs"), n) >= 1 << 30:
        found.append(no("size", "sizes of 2^30 and more do not fit its numbers"))
    return all_of(*found)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: it is chosen where it was measured."""
    del spec
    return no("not measured", f"chosen on {platform} where it was measured, as by tune")
