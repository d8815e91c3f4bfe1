"""One use of attention, as the kernels of both passes take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.hopper import shared_keys
from rewriter.kernels.attention.hopper.block_masks import Masks
from rewriter.kernels.attention.hopper.blocks import Mask
from rewriter.kernels.attention.hopper.widths import EDGE

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Heads
    from rewriter.ops.score import Score

EXTRA = (
    "bias", "mask", "q_segments", "kv_segments", "kv_positions", "first_position",
    "last_position", "alibi", "sinks", "score",
)  # fmt: skip
"""What changes scores beside positions."""


def head_in_array(packed: tuple[tuple[str, Heads], ...], name: str, head: Any) -> Any:
    """Returns the number of an operand's head in the array that is read.

    Args:
        packed: `Use.heads`.
        name: The operand, or any other array.
        head: Its head.
    """
    at = dict(packed).get(name)
    return head if at is None else at.first + at.step * head


@dataclass(frozen=True)
class Use:
    """The operands and parameters of the op, for supported uses.

    Attributes:
        q: [b, t, n, h], bfloat16 or float16.
        k: [b, s, k, h].
        v: [b, s, k, e].
        bias: float [b|1, n|1, t|1, s|1].
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s].
        kv_positions: int [b|1, s]; what the next two are compared with.
        first_position: int [b|1, t]; keys at positions before it are not seen.
        last_position: int [b|1, t]; those behind it are not.
        kv_lengths: int [b|1].
        offset: int [b|1].
        prefix: int [b|1]; keys before it are seen whatever the window, which then has
            no left end.
        alibi: float [n].
        sinks: float [n].
        scale: Multiplies the scores; positive.
        window: As in `reference`.
        shift: As in `reference`.
        softcap: As in `reference`.
        empty_rows: As in `reference`.
        fill: The score of hidden keys where `reaches` holds; see
            `rewriter.kernels.attention.fills`.
        fill_passes: Whether it is the least of that and their own.
        reaches: Whether rows may weigh hidden keys, a bool that is known at run time.
        out_dtype: q's, or float32.
        weights: Whether v is multiplied with twice the digits of q's dtype, where not
            None; see `rewriter.kernels.attention.weights`.
        score: A function that scores go through before all else.
        packed: By names among q, k and v, an array [b, t, heads, h] to read instead,
            and the operand's heads in it.
        joined: The heads of cotangents in one array that is to hold them, by names
            among q, k and v.
        read: What it reads, by name: `rewriter.kernels.attention.scored_form`.
        shared: For k, perhaps, two arrays to read instead; see `shared_keys`.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    mask: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    kv_positions: Array | None = None
    first_position: Array | None = None
    last_position: Array | None = None
    kv_lengths: Array | None = None
    offset: Array | None = None
    prefix: Array | None = None
    alibi: Array | None = None
    sinks: Array | None = None
    scale: float = 1.0
    window: tuple[int | None, int | None] = (None, None)
    shift: int = 0
    softcap: float | None = None
    empty_rows: str = "nan"
    fill: float | None = None
    fill_passes: bool = False
    reaches: Array | None = None
    out_dtype: str | None = None
    weights: str | None = None
    score: Score | None = None
    packed: Mapping[str, tuple[Array, Heads]] = field(default_factory=dict)
    joined: Mapping[str, Heads] = field(default_factory=dict)
    read: Mapping[str, Array] = field(default_factory=dict)
    shared: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Array]:
        """Returns the arrays from which q, k and v are read, by name."""
        own = {"q": self.q, "k": self.k, "v": self.v}
        for both in self.shared.values():
            own |= shared_keys.arrays(both)
        return own | {name: array for name, (array, _) in self.packed.items()}

    @property
    def heads(self) -> tuple[tuple[str, Heads], ...]:
        """The heads of packed operands by name."""
        return tuple((name, heads) for name, (_, heads) in sorted(self.packed.items()))

    def unpacked(self) -> Use:
        """Returns the use with packed operands cut out, for code beside the kernels."""
        cut = {n: array[:, :, at.indices] for n, (array, at) in self.packed.items()}
        return replace(self, packed={}, **cut)

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of heads of q and of v."""
        return self.q.shape[3], self.v.shape[3]

    def by_rows(self, widths: tuple[int, int]) -> bool:
        """Whether arrays are copied by rows; see `panels`.

        Others are copied by tiles, which begin and end at multiples of `EDGE` rows, and
        hold no columns beside theirs.

        Args:
            widths: The widths of heads of q and of v that kernels read.
        """
        odd = any(x % EDGE for x in self.lengths)
        return odd or widths != self.widths or bool(self.shared)

    @property
    def extra(self) -> dict[str, Any]:
        """What is present of `EXTRA`, and what a function reads, by name."""
        given = {name: getattr(self, name) for name in EXTRA} | dict(self.read)
        return {name: x for name, x in given.items() if x is not None}

    @property
    def masks(self) -> Masks:
        """What hides keys, beside the window and the numbers of `numbers`."""
        pair = self.q_segments, self.kv_segments
        ends = self.first_position, self.last_position
        return Masks(
            self.mask,
            None if pair[0] is None or pair[1] is None else pair,
            (self.kv_positions, *ends) if any(x is not None for x in ends) else None,
        )

    def hidden(self) -> Array:
        """Returns the scores of hidden keys, float32: the fill, or -inf."""
        nothing = jnp.float32(-jnp.inf)
        if self.fill is None or self.reaches is None:
            return nothing
        return jnp.where(self.reaches[0], self.fill, nothing).astype(jnp.float32)

    def numbers(self) -> dict[str, Array]:
        """Returns what is known of positions at run time, int32 [b] each, by name."""
        given = {
            "lengths": self.kv_lengths, "offsets": self.offset, "prefixes": self.prefix,
        }  # fmt: skip
        b = self.q.shape[0]
        return {
            name: jnp.broadcast_to(x.astype(jnp.int32), (b,))
            for name, x in given.items()
            if x is not None
        }

    def visible(self, hides: bool, mean: bool = False) -> Mask:
        """Returns which keys a query sees.

        Args:
            hides: Whether other operands hide keys too.
            mean: Whether a row that sees no key gives the mean of all values.
        """
        left, right = self.window
        return Mask(
            *self.lengths, left, right, self.shift,
            lengths=self.kv_lengths is not None,
            offsets=self.offset is not None,
            mean=mean, more=hides, prefixes=self.prefix is not None,
            weighs=self.fill is not None,
        )  # fmt: skip

    def seen_by(self, hides: bool) -> Mask:
        """Returns which queries see a key: `visible`, with rows and columns swapped.

        Lengths of keys are not part of it: kernels with tiles of keys read them.
        """
        (t, s), (left, right) = self.lengths, self.window
        return Mask(
            s, t, right, left, -self.shift, offsets=self.offset is not None,
            more=hides, prefixes=self.prefix is not None,
            weighs=self.fill is not None,
        )  # fmt: skip
