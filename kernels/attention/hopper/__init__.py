"""Attention on NVIDIA Hopper GPUs, in Pallas Mosaic GPU: what the kernel supports.

Pallas takes half a second to import, so the kernels themselves are imported where they
are first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.by_entry import by_entry
from rewriter.kernels.attention.fills import REACHES
from rewriter.kernels.attention.hopper.backward_config import (
    BackwardTiles as BackwardTiles,
)
from rewriter.kernels.attention.hopper.backward_config import (
    backward_configs as backward_configs,
)
from rewriter.kernels.attention.hopper.backward_config import (
    backward_default as backward_default,
)
from rewriter.kernels.attention.hopper.backward_config import (
    first_fitting_backward,
    fits_backward_widths,
)
from rewriter.kernels.attention.hopper.backward_config import (
    fits_backward as fits_backward,
)
from rewriter.kernels.attention.hopper.config import Tiles as Tiles
from rewriter.kernels.attention.hopper.config import configs as configs
from rewriter.kernels.attention.hopper.config import default as default
from rewriter.kernels.attention.hopper.config import first_fitting, fits_widths
from rewriter.kernels.attention.hopper.config import fits as fits
from rewriter.kernels.attention.hopper.dtypes import (
    is_halved,
    products,
    takes_dtypes,
    takes_halves,
)
from rewriter.kernels.attention.hopper.extra_operands import extra_in, extra_of
from rewriter.kernels.attention.hopper.shared_keys import takes_shared
from rewriter.kernels.attention.hopper.time_model import estimate, margin, modelled
from rewriter.kernels.attention.hopper.widths import COPIED, filled, filled_backward
from rewriter.kernels.attention.hopper.widths import widths as widths
from rewriter.kernels.attention.memory import temporary
from rewriter.kernels.attention.weights import PARAM, PRECISION
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.joined import join
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jax import Array

    from rewriter.ops.kernel import Heads, Spec

OPERANDS = frozenset(
    {
        "q", "k", "v", "bias", "mask", "q_segments", "kv_segments", "kv_lengths",
        "kv_positions", "first_position", "last_position", "offset", "prefix", "alibi",
        "sinks",
    }
)  # fmt: skip
PLACES = frozenset({"kv_positions", "first_position", "last_position"})
LARGEST_CAP = 1e4
"""A cap c has an error of c times 1e-7, for small scores too: see `pallas.tanh`."""
WIDEST = 256
"""Columns of a tensor core's product, and so the widest head."""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: operands of one float, widths up to 256."""
    if spec.symbolic:
        return no("symbolic", "the Hopper kernel needs known sizes")
    halved = is_halved(spec.dtype("q"))
    dtypes = takes_halves(spec) if halved else takes_dtypes(spec)
    verdict = all_of(_operands(spec), dtypes, _sizes(spec), _numbers(spec))
    if not verdict.ok:
        return verdict
    return all_of(
        room(spec), importable("rewriter.kernels.attention.hopper.forward_kernel")
    )


def deterministic(config: BackwardTiles | None) -> Verdict:
    """Returns whether gradients have the same bits in every run: not if fused."""
    if config is None or not config.fused:
        return YES
    return no("deterministic", "the gradient of q is added up in no fixed order")


def _operands(spec: Spec) -> Verdict:
    more = sorted(set(spec.operands) - OPERANDS)
    if more:
        return no("operands", f"the Hopper kernel does not take {', '.join(more)}")
    return YES


def _sizes(spec: Spec) -> Verdict:
    found = [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]
    for name, width in (("q", spec.shape("q")[3]), ("v", spec.shape("v")[3])):
        if width > WIDEST:
            text = f"heads of {name} are {width} wide, more than {WIDEST}"
            found.append(no("width", text))
    return all_of(YES, *found)


def _numbers(spec: Spec) -> Verdict:
    found = [YES]
    if spec.param("scale", 1.0) <= 0:
        found.append(no("scale", f"scale is {spec.param('scale')}, not positive"))
    if spec.has("prefix") and spec.param("window", (None, None))[0] is not None:
        text = "the Hopper kernel takes a prefix where windows have no left end"
        found.append(no("prefix", text))
    for name in sorted(PLACES & set(spec.operands)):
        if jnp.iinfo(spec.dtype(name)).max > jnp.iinfo(jnp.int32).max:
            text = f"{name} is {spec.dtype(name)}, and the Hopper kernel compares int32"
            found.append(no("dtype", text))
    if (spec.param("softcap") or 1.0) <= 0:
        found.append(no("softcap", f"softcap is {spec.param('softcap')}, not positive"))
    if (spec.param("softcap") or 1.0) > LARGEST_CAP:
        text = f"softcap is {spec.param('softcap')}: small scores would be inexact"
        found.append(no("softcap", text))
    return all_of(*found)


def room(spec: Spec) -> Verdict:
    """Returns whether the smallest tiles fit; wide heads leave little memory."""
    smallest, count = Tiles(32, 2, 2), products(spec.param(PARAM), spec.dtype("q"))
    return fits_widths(smallest, *widths(spec), extra_in(spec), count)


def forward(**given: Any) -> Any:
    """Returns attention; see `rewriter.kernels.attention.hopper.forward_kernel`.

    Heads are padded to multiples of `COPIED` with zeros, which change no score.
    """
    from rewriter.kernels.attention.hopper import forward_kernel

    e = given["v"].shape[3]
    given = _with_widths(given, "qkv")
    sizes = filled(given["q"].shape[3]), filled(given["v"].shape[3])
    given.pop(PRECISION, None)  # `takes_halves` says which
    count = products(given.get(PARAM), given["q"].dtype)
    extra = extra_of(flat(given))
    config = given.pop("config", None) or first_fitting(*sizes, extra, count)
    made = forward_kernel.forward(**given, config=config)
    if not given.get("residuals"):
        return made[..., :e]
    out, kept = made
    return out[..., :e], kept


def saves(spec: Spec) -> list[Any]:
    """Returns the type of the log-sum-exp of each row, [b, n, t]."""
    b, t, n, _ = spec.shape("q")
    return [((b, n, t), "float32")]


def backward(**given: Any) -> dict[str, Array]:
    """Returns the cotangents of float operands from the result and its log-sum-exp.

    Uses that fit no tiles are left to `rewriter.kernels.attention.xla`, and so is the
    cotangent of a bias without `BackwardTiles.tables`. Compilers drop unused gradients.
    """
    given.pop(PARAM, None)  # gradients are as exact as q
    given.pop(PRECISION, None)
    reaches = {REACHES: given.pop(REACHES)} if REACHES in given else {}
    joined = given.pop("joined", {})
    whole = _with_widths(given, ("q", "k", "v", "out", "cotangent"))
    given.pop("packed", None)
    sizes = [filled_backward(whole[name].shape[3]) for name in "qv"]
    extra = extra_of(flat(given))
    halves = is_halved(given["q"].dtype)
    config = given.pop("config", None) or first_fitting_backward(*sizes, extra, halves)
    if config is None or not (
        config.short or fits_backward_widths(config, *sizes, extra, halves).ok
    ):
        return _joined(xla.backward(**flat(given)), joined)
    from rewriter.kernels.attention.hopper import backward_kernel

    if joined and all(whole[name] is given[name] for name in "qkv"):
        whole["joined"] = joined
    grads = backward_kernel.backward(**whole | reaches | {"config": config})
    own = grads.keys() & set("qkv")
    grads |= {name: grads[name][..., : given[name].shape[3]] for name in own}
    left = {"bias", "alibi"} & given.keys() - grads.keys()
    if left:
        others = xla.backward(**given)
        grads |= {name: others[name] for name in left}
    return grads if "joined" in grads else _joined(grads, joined)


def _joined(grads: dict[str, Array], joined: Mapping[str, Heads]) -> dict[str, Array]:
    """Returns cotangents with some of them put together, as `Traits.joins` says."""
    if not joined:
        return grads
    rest = {name: x for name, x in grads.items() if name not in joined}
    return rest | {"joined": join(grads, joined)}


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns operands and parameters with what a function reads among them."""
    return {n: x for n, x in given.items() if n != "read"} | dict(given.get("read", {}))


def _with_widths(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns operands with widths that are copied; padded ones are not packed."""
    made = given | {name: _filled(given[name]) for name in names}
    packed = {
        name: (array.reshape(*given[name].shape[:2], heads.all, -1), heads)
        for name, (array, heads) in given.get("packed", {}).items()
        if made[name] is given[name]
    }
    made.pop("packed", None)
    if "shared" in made and not takes_shared(made, made["k"] is given["k"]):
        del made["shared"]
    return made | ({"packed": packed} if packed else {})


def _filled(x: Array) -> Array:
    """Pads [..., width] with zeros to a width that is copied."""
    more = -x.shape[-1] % COPIED
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


KERNEL = by_entry(
    HOPPER.kernel(
        "attention", forward, backward, supports,
        Speed(
            by_estimate, by_rule=False, estimate=estimate, margin=margin,
            modelled=modelled, temporary=temporary,
        ),
        Space(Tiles, default, configs, fits),
        Space(BackwardTiles, backward_default, backward_configs, fits_backward),
        deterministic=deterministic, saves_out=True, merges=True, saves=saves,
        swaps=(("q", 1, 2), ("k", 1, 2), ("v", 1, 2)), packs=("q", "k", "v"),
        shares=("k",), joins=("q", "k", "v"),
    )
)  # fmt: skip
