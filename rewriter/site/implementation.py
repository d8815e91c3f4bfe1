"""Resolves names and configs to one kernel: how both passes of a site are computed."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Limits, Space, Spec, Traits
from rewriter.ops.op import Op
from rewriter.ops.registry import REFERENCE
from rewriter.support.verdict import all_of

XLA = "xla"
"""The name of the choice that leaves the program as written."""

RING = "ring"
"""The name by which users ask for operands that devices pass around a ring."""

Settings = tuple[tuple[str, Any], ...] | None
"""A config as (field, value) pairs; None for the kernel's rule of thumb."""


@dataclass(frozen=True)
class Implementation:
    """Which kernel computes each pass of a site, and with which config.

    Attributes:
        forward: A kernel's name, ``"reference"`` for the op's plain form, or
            ``"xla"`` for the program as it was written, with its own gradient.
        backward: The kernel of the backward pass; ``"reference"`` for `jax.vjp` of the
            op's plain form; empty for the forward's kernel.
        config: The forward's config.
        backward_config: The backward's.

    Example:
        >>> Implementation("cudnn", "memory_bounded").name
        'cudnn, backward memory_bounded'
    """

    forward: str = XLA
    backward: str = ""
    config: Settings = None
    backward_config: Settings = None

    @property
    def name(self) -> str:
        """The kernels' names in words."""
        if not self.backward or self.backward == self.forward:
            return self.forward
        return f"{self.forward}, backward {self.backward}"

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of its kernels, each once."""
        names = dict.fromkeys((self.forward, self.backward or self.forward))
        return tuple(n for n in names if n not in (XLA, REFERENCE))

    @property
    def configs(self) -> str:
        """The configs in words; empty for rules of thumb."""
        first, second = map(_settings_text, (self.config, self.backward_config))
        if second and second != first:
            second = f"backward {second}"
        return "; ".join(dict.fromkeys(p for p in (first, second) if p))

    @property
    def text(self) -> str:
        """The names and configs in words."""
        return f"{self.name} ({self.configs})" if self.configs else self.name


def _settings_text(settings: Settings) -> str:
    return ", ".join(f"{k}={v}" for k, v in settings or ())


def settings(config: Any) -> Settings:
    """Returns a config, a frozen dataclass, as pairs; None for None."""
    return None if config is None else tuple(asdict(config).items())


def default_configs(
    spec: Spec, device: Device, forward: Kernel | None, backward: Kernel | None = None
) -> Implementation:
    """Returns kernels with their default configs, chosen by rules of thumb.

    Args:
        spec: The use of the op. With symbolic sizes there is a default config only
            if the kernel's space has one.
        device: Where it will run.
        forward: The forward's kernel; None for the reference.
        backward: The backward's kernel, if it is another one.
    """
    second = backward or forward
    return Implementation(
        REFERENCE if forward is None else forward.name,
        "" if backward is None else backward.name,
        None if forward is None else _thumb(forward.space, spec, device),
        None if second is None else _thumb(second.backward_space, spec, device),
    )


def _thumb(space: Space | None, spec: Spec, device: Device) -> Settings:
    if space is None or (spec.symbolic and not space.symbolic):
        return None
    return settings(space.default(spec, device))


def configured(
    implementation: Implementation,
    kernels: Mapping[str, Kernel],
    spec: Spec,
    device: Device,
) -> bool:
    """Returns whether its kernels support its configs, which may come from a file.

    Args:
        implementation: The implementation.
        kernels: Kernels by name.
        spec: The use of the op; its sizes may be symbolic.
        device: Where it will run.
    """
    first = kernels.get(implementation.forward)
    second = kernels.get(implementation.backward or implementation.forward)
    return _can_be(
        first.space if first else None, implementation.config, spec, device
    ) and _can_be(
        second.backward_space if second else None,
        implementation.backward_config,
        spec,
        device,
    )


def _can_be(
    space: Space | None, settings: Settings, spec: Spec, device: Device
) -> bool:
    """Whether a space has such a config, with values of its fields' types."""
    try:
        config = config_of(space, settings)
        if config is None or space is None:
            return True
        kinds = _kinds(space.config)
        if not all(
            _is_a(value, kinds.get(name, Any)) for name, value in settings or ()
        ):
            return False
        if spec.symbolic:
            return True
        alike = _proposed_alike(config, space, spec, device)
        return alike and bool(space.fits(config, spec, device).ok)
    except Exception:  # a kernel's own code may raise anything on foreign numbers
        return False


def _kinds(config: type) -> Mapping[str, Any]:
    """The types of a config's fields; empty if their annotations cannot be resolved."""
    try:
        return typing.get_type_hints(config)
    except NameError:
        return {}


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value has a declared type; a bool does not count as a number."""
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, k) for k in kinds)
    if origin is typing.Literal:
        return value in kinds
    plain = origin or kind
    if not isinstance(plain, type):
        return True
    if isinstance(value, bool):
        return plain in (bool, object)
    return isinstance(value, (int, float) if plain is float else plain)


def _proposed_alike(config: Any, space: Space, spec: Spec, device: Device) -> bool:
    """Whether numbers are positive, except where the space proposes 0 or less."""
    odd = {
        name: value < 0
        for name, value in asdict(config).items()
        if type(value) in (int, float) and not value > 0
    }
    if not odd:
        return True
    proposed = [space.default(spec, device), *space.configs(spec, device)]
    return all(
        any((v := getattr(p, name)) is not None and v <= 0 and (v < 0) == below
            for p in proposed)
        for name, below in odd.items()
    )  # fmt: skip


def build(
    implementation: Implementation, op: Op, kernels: Sequence[Kernel]
) -> Kernel | None:
    """Returns one kernel that computes both passes; None for the reference alone.

    Where the two passes come from different kernels, the backward pass first runs its
    own kernel's forward for the residuals it reads. Equal arguments give the same
    kernel, so that equal sites are compiled once.

    Raises:
        KeyError: If a kernel is not among those given.
        TypeError: If a config has other fields than the kernel's.
    """
    by_name = {k.name: k for k in kernels}
    forward = _named(by_name, implementation.forward)
    backward = _named(by_name, implementation.backward or implementation.forward)
    return _built(implementation, op, forward, backward)


def _named(kernels: Mapping[str, Kernel], name: str) -> Kernel | None:
    return None if name in (REFERENCE, XLA) else kernels[name]


@functools.lru_cache(maxsize=4096)
def _built(
    implementation: Implementation,
    op: Op,
    forward: Kernel | None,
    backward: Kernel | None,
) -> Kernel | None:
    if forward is None and (backward is None or backward.backward is None):
        return None
    if forward is not None:
        forward = _with_forward(forward, implementation.config)
    if backward is not None:
        backward = _with_backward(backward, implementation.backward_config)
    if implementation.backward in ("", implementation.forward):
        assert forward is not None
        assert backward is not None
        return replace(forward, backward=backward.backward, together=backward.together)
    if backward is None or backward.backward is None:
        assert forward is not None
        return replace(
            forward, backward=None, together=None, saves_out=False,
            backward_space=None, adds_to="",
        )  # fmt: skip
    return _mixed(op, forward, backward, implementation.name)


def _with_forward(kernel: Kernel, settings: Settings) -> Kernel:
    config = config_of(kernel.space, settings)
    if config is None:
        return kernel
    return replace(kernel, forward=functools.partial(kernel.forward, config=config))


def _with_backward(kernel: Kernel, settings: Settings) -> Kernel:
    config = config_of(kernel.backward_space, settings)
    if config is None or kernel.backward is None:
        return kernel
    bound = {"backward": functools.partial(kernel.backward, config=config)}
    if kernel.together is not None:
        bound["together"] = functools.partial(kernel.together, config=config)
    return replace(kernel, **bound)


def config_of(space: Space | None, settings: Settings) -> Any:
    """Returns a space's config with these settings; None for None.

    Raises:
        TypeError: If there is no space, or its config has other fields.
    """
    if settings is None:
        return None
    if space is None:
        raise TypeError("a config for a kernel without configs")
    return space.config(**dict(settings))


def _mixed(op: Op, first: Kernel | None, second: Kernel, name: str) -> Kernel:
    """The forward of one kernel with the backward of another, which runs its own."""
    plain: Callable[..., Any] = op.reference if first is None else first.forward
    both = [k for k in (first, second) if k is not None]
    at = second.traits.adds_to
    adds = first is not None and first.traits.adds_to == at

    def forward(*, residuals: bool = False, **given: Any) -> Any:
        if "addend" in given and not adds:
            given[at] = given[at] + given.pop("addend")
            out = given[at], plain(**given)
        else:
            out = plain(**given)
        return (out, ()) if residuals else out

    def backward(
        *,
        out: Any,
        residuals: Any,
        cotangent: Any,
        addend: Any = None,
        **given: Any,
    ) -> Any:
        del out, residuals
        more = {} if addend is None else {"addend": addend}
        result, saved = second.forward(**given, residuals=True)
        assert second.backward is not None
        return second.backward(
            **given,
            out=result if second.traits.saves_out else None,
            residuals=tuple(saved),
            cotangent=cotangent,
            **more,
        )

    return Kernel(
        name=name,
        op=op.name,
        platforms=tuple(p for p in second.platforms if p in both[0].platforms),
        version=max(k.version for k in both),
        forward=forward,
        backward=backward,
        limits=Limits(
            lambda spec: all_of(*(k.limits.supports(spec) for k in both)),
            lambda device: all_of(*(k.limits.runs_on(device) for k in both)),
        ),
        traits=Traits(
            memory_bounded=all(k.traits.memory_bounded for k in both),
            saves_out=False,
            exportable=all(k.traits.exportable for k in both),
            needs_devices=any(k.traits.needs_devices for k in both),
            adds_to=at,
        ),
    )
