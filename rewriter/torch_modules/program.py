"""A module as a pure function of its state, its random key and its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from rewriter.torch_modules.arrays import array_of, on_jax, tensor_of
from rewriter.torch_modules.imported import torchax
from rewriter.torch_modules.trees import Structure, flattened


class State(NamedTuple):
    """Parameters and buffers of a module, by the names of its ``state_dict``.

    Attributes:
        params: Parameters of which gradients are asked for.
        buffers: Other parameters, buffers, and tensors that are plain attributes.
    """

    params: dict[str, Any]
    buffers: dict[str, Any]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Called:
    """A call of a module: the structure of its arguments, and which parts are trained.

    Attributes:
        structure: The structure of arguments by position and by name.
        training: Which of its modules are being trained.
    """

    structure: Structure
    training: tuple[bool, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Returned:
    """The result of a call without its arrays: a structure, and if it drew numbers."""

    structure: Structure
    drew: bool


def called(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], Called]:
    """Returns the tensors of a call, and the rest of it."""
    tensors, structure = flattened((args, kwargs))
    training = tuple(m.training for m in module.modules())
    return tensors, Called(structure, training)


def tensors_of(module: torch.nn.Module) -> State:
    """Returns the tensors that a module holds; tied ones are named once."""
    params: dict[str, Any] = {}
    buffers: dict[str, Any] = dict(module.named_buffers())
    for name, value in module.named_parameters():
        (params if value.requires_grad else buffers)[name] = value
    for owner, name, full in _plain_tensors(module):
        buffers[full] = vars(owner)[name]
    return State(params, buffers)


def state_of(module: torch.nn.Module) -> State:
    """Returns copies of what a module holds, as arrays."""
    found = tensors_of(module)
    return State(*({k: array_of(v) for k, v in part.items()} for part in found))


def _plain_tensors(module: torch.nn.Module) -> Iterator[tuple[Any, str, str]]:
    """Tensors that are attributes, and neither parameters nor buffers."""
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield owner, name, f"{path}.{name}" if path else name


def function_of(module: torch.nn.Module) -> Any:
    """Returns the pure function that a module is.

    It takes a `Called`, a `State` of arrays, a random key and the arrays of arguments.
    It returns arrays, what surrounds them, and the buffers that were changed.
    """

    def run(
        call: Called, state: State, key: jax.Array, arrays: list[Any]
    ) -> tuple[list[Any], Returned, dict[str, Any]]:
        env = torchax().default_env()
        arrays, given = [*map(jnp.asarray, arrays)], {**state.params, **state.buffers}
        held: dict[str, Any] = env.j2t_iso(dict(given))
        args, kwargs = call.structure.joined(env.j2t_iso(arrays))
        with torch.no_grad(), env, env.override_property(prng=key):
            out, after = _call(module, held, args, kwargs)
            tensors, structure = flattened(out)
            found = [x.jax() if on_jax(x) else array_of(x) for x in tensors]
            drew = env.param.prng is not key
        now = {k: v.jax() for k, v in after.items() if on_jax(v)}
        changed = {k: v for k, v in now.items() if v is not given.get(k)}
        return found, Returned(structure, drew), changed

    run.__name__ = run.__qualname__ = type(module).__name__
    return run


def _call(
    module: torch.nn.Module, held: dict[str, Any], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns what a module returns that holds these tensors, and holds afterwards."""
    before = {full: owner for owner, _, full in _plain_tensors(module)}
    own = {k: v for k, v in held.items() if k not in before}
    with _with_plain_tensors(module, held):
        out = torch.func.functional_call(module, own, args, kwargs)
        plain = {full: vars(o)[name] for o, name, full in _plain_tensors(module)}
    return out, {**own, **plain}


@contextlib.contextmanager
def _with_plain_tensors(
    module: torch.nn.Module, held: Mapping[str, Any]
) -> Iterator[None]:
    """Has tensors that are plain attributes hold other ones meanwhile."""
    before = [(o, n, vars(o)[n], full) for o, n, full in _plain_tensors(module)]
    try:
        for owner, name, _, full in before:
            vars(owner)[name] = held[full]
        yield
    finally:
        for owner, name, _ in list(_plain_tensors(module)):
            del vars(owner)[name]  # also those that the call set
        for owner, name, value, _ in before:
            vars(owner)[name] = value


def restore(module: torch.nn.Module, changed: Mapping[str, Any]) -> None:
    """Gives a module the tensors that a call changed, in place where it holds them."""
    now = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for full, array in changed.items():
        path, _, name = full.rpartition(".")
        held = now.get(full)
        with torch.no_grad():
            if held is None or on_jax(held):
                value = array if held is None else torchax().interop.torch_view(array)
                value = tensor_of(value) if held is None else value
                setattr(module.get_submodule(path), name, value)
            else:
                held.copy_(tensor_of(array))
