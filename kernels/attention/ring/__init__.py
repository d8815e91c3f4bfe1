"""Ring attention: keys split over devices travel around a ring, and are never gathered.

Every device keeps its queries and attends to one part of the keys at a time. It merges
the result by its log-sum-exp, while the next part is being sent. Parts that a window
hides from a device cost it no time; parts hidden from all devices are not sent. Source:
Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.empty_rows import PASSING
from rewriter.kernels.attention.fills import FILL, must_compare
from rewriter.kernels.attention.overflow import PARAM
from rewriter.kernels.attention.ring.passes import PASSED, backward, forward
from rewriter.kernels.attention.ring.turns import turns
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.op import Ring
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rewriter.ops.kernel import Spec

OPERANDS = frozenset({"q", "k", "v", "q_segments", "kv_segments", "kv_lengths"})


def supports(spec: Spec, count: int) -> Verdict:
    """Returns whether a ring supports a use; `spec` is one device's part."""
    if spec.symbolic:
        return SYMBOLIC
    more = sorted(set(spec.operands) - OPERANDS)
    found = [YES]
    if more:
        found.append(no("operands", f"a ring does not take {', '.join(more)}"))
    if spec.param("empty_rows") == PASSING and spec.param("softcap") is not None:
        text = "scores of rows without keys get gradients through a soft cap"
        found.append(no("softcap", f"{text}, for which a ring would go around again"))
    if spec.param(PARAM) is not None:
        text = "rows that overflow without the maximum of the scores"
        found.append(no(PARAM, f"a ring cannot tell {text}"))
    if must_compare(spec):
        text = "rows that weigh hidden keys: their log-sum-exp is that of the fill"
        found.append(no(FILL, f"a ring cannot merge {text}"))
    window, shift = spec.param("window"), spec.param("shift")
    t, s = spec.shape("q")[1], spec.shape("k")[1]
    if window != (None, None) and t != s:
        text = f"{t} queries and {s} keys on each device: a ring needs as many of both"
        found.append(no("sizes", text))
    elif turns(window, shift, t, count)[0].before is None:
        found.append(no("window", "the window hides each device's own keys"))
    return all_of(*found)


def uses(spec: Spec, count: int) -> tuple[Mapping[str, Any], ...]:
    """Returns the parameters of attention to one part of the keys, for all turns."""
    ahead = turns(spec.param("window"), spec.param("shift"), spec.shape("q")[1], count)
    found = [s for turn in ahead for s in (turn.before, turn.around) if s]
    plain = dict(spec.params)
    return tuple(
        {
            **plain,
            "window": s.window,
            "shift": s.shift,
            "empty_rows": "zero",
            FILL: None,
        }
        for s in dict.fromkeys(found)
    )


PAYS_FROM, HIDES = 64 << 20, 2048
"""PAYS_FROM: the fewest bytes of gathered keys and values, in all layers that keep
them, for which a ring pays. HIDES: the fewest queries (of all grouped heads) per key
that hide passing it on: in 16 bits that many operations come upon each byte. By their
data sheets an H100 does 2200 while NVLink moves a byte, a TPU v5e 3900 while one of its
links does. Estimates: nothing was measured."""


def pays(spec: Spec, count: int, kept: int) -> Verdict:
    """Returns whether passing keys around is worth more than gathering them.

    A gather gives each device all keys and values, and keeps them for each gradient; a
    ring holds those of two devices. A ring's forward moves as much, or less if a window
    ends it. For a gradient, keys and values go around again with their cotangents: six
    parts per turn, where a gather and the scattered sum of cotangents move four.

    Args:
        spec: What one device has.
        count: The number of devices in the ring.
        kept: How often the gathered keys are kept for gradients.
    """
    part = spec.nbytes("k") + spec.nbytes("v")
    t, group = spec.shape("q")[1], spec.shape("q")[2] // spec.shape("k")[2]
    gathered = count * part * max(1, kept)
    hops = len(turns(spec.param("window"), spec.param("shift"), t, count)) - 1
    more = 6 * hops / (4 * (count - 1)) if kept else hops / (count - 1)
    found = [YES]
    if gathered < PAYS_FROM:
        text = (
            f"keys and values of {gathered >> 10} KiB gathered on each device are few"
        )
        found.append(no("small", text))
    if more > 1 and t * group < HIDES:
        text = f"it moves {more:.1f} times as much as a gather and a sum, and"
        text += f" {t * group} queries a device are too few to hide that behind"
        found.append(no("moved", text))
    return all_of(*found)


RING = Ring(
    letter="s",
    rows="t",
    passed=PASSED,
    moving=("q", "k", "v"),
    supports=supports,
    uses=uses,
    pays=pays,
    forward=forward,
    backward=backward,
)
