"""Splits arguments and results of a module into tensors and their structure."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from torch.utils import _pytree as pytree

from rewriter.errors import RewriterError
from rewriter.torch_modules.arrays import is_tensor


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor."""


@dataclass(frozen=True)
class _Object:
    """An object of some class, such as a cache, without its tensors.

    Attributes:
        data: The pickled object, with numbers in place of its tensors.
        tensors: How many it has.
        kind: The name of its class.
    """

    data: bytes
    tensors: int
    kind: str


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Structure:
    """A tree without its tensors. Equal ones have equal leaves of equal types."""

    spec: Any
    leaves: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Structure)
            and self.spec == other.spec
            and [*map(type, self.leaves)] == [*map(type, other.leaves)]
            and self.leaves == other.leaves
        )

    def __hash__(self) -> int:
        return hash((len(self.leaves), tuple(type(x).__name__ for x in self.leaves)))

    def joined(self, tensors: Sequence[Any]) -> Any:
        """Returns the tree with tensors."""
        rest, leaves = list(tensors), []
        for leaf in self.leaves:
            if isinstance(leaf, _Slot):
                leaves.append(rest.pop(0))
            elif isinstance(leaf, _Object):
                own, rest = rest[: leaf.tensors], rest[leaf.tensors :]
                leaves.append(_Unpickler(leaf.data, own).load())
            else:
                leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.spec)

    def plain(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with arrays, of dicts, lists and tuples alone.

        Raises:
            RewriterError: If there is an object that is none of these.
        """
        for leaf in self.leaves:
            if isinstance(leaf, _Object):
                raise RewriterError(
                    f"the module returns a {leaf.kind}, which is no array",
                    next_step="Ask the module not to, as by use_cache=False",
                )
        return _plain(self.joined(arrays))


def flattened(tree: Any) -> tuple[list[Any], Structure]:
    """Returns a tree's tensors in order, and its structure.

    Raises:
        RewriterError: If an object in it cannot be pickled.
    """
    found, spec = pytree.tree_flatten(tree)
    tensors: list[Any] = []
    leaves: list[Any] = []
    for leaf in found:
        if is_tensor(leaf):
            tensors.append(leaf)
            leaves.append(_Slot())
        elif isinstance(leaf, (type(None), bool, int, float, complex, str, bytes)):
            leaves.append(leaf)
        else:
            own: list[Any] = []
            leaves.append(_pickled(leaf, own))
            tensors += own
    return tensors, Structure(spec, tuple(leaves))


def _pickled(leaf: Any, own: list[Any]) -> _Object:
    written = io.BytesIO()
    try:
        _Pickler(written, own).dump(leaf)
    except Exception as error:
        raise RewriterError(
            f"a {type(leaf).__name__} that cannot be pickled: {error}",
            wanted="tensors, numbers, text, and objects of them",
        ) from error
    return _Object(written.getvalue(), len(own), type(leaf).__name__)


class _Pickler(pickle.Pickler):
    """Writes an object with numbers in place of its tensors."""

    def __init__(self, file: Any, tensors: list[Any]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor."""
        if not is_tensor(obj):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Reads an object that this process wrote, with other tensors."""

    def __init__(self, data: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Any:
        """The tensor of a number."""
        return self.tensors[pid]


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = map(_plain, tree)
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return [*map(_plain, tree)] if isinstance(tree, list) else tree
