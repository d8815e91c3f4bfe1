"""PyTorch modules on better kernels: `optimize`, `explain`, `export` and `kernel`.

A module runs as a JAX program, through torchax. It stays as it is: the optimized one
holds the same parameters, under the same names. Importing `rewriter` does not import
PyTorch; importing this module does.

Example:
    >>> import torch, rewriter.torch
    >>> fast = rewriter.torch.optimize(torch.nn.RMSNorm(8))
    >>> fast(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    >>> fast.report().counts()["rms_norm"]
    1
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from rewriter.errors import NotTraceable, RewriterError, StateLost, caller
from rewriter.reports.report import Report
from rewriter.run.export import Artifact
from rewriter.run.export import export as export_function
from rewriter.run.optimize import optimize as optimize_function
from rewriter.torch_modules.arrays import array_of, on_jax, tensor_of
from rewriter.torch_modules.gradients import Reads, recorded, with_vjp
from rewriter.torch_modules.imported import torchax
from rewriter.torch_modules.program import (
    Called,
    State,
    called,
    function_of,
    restore,
    state_of,
    tensors_of,
)

__all__ = ["OptimizedModule", "State", "explain", "export", "kernel", "optimize"]


def optimize(module: torch.nn.Module, /, **options: Any) -> OptimizedModule:
    """Returns a module that computes the same, with recognised ops on better kernels.

    It takes and returns tensors of PyTorch. ``loss.backward()`` works, and so do
    PyTorch's optimizers, as parameters are shared with the module.

    Args:
        module: Any module whose ``forward`` torchax can trace: shapes may not depend
            on numbers in tensors.
        **options: As in ``rewriter.optimize``.

    Raises:
        NotTraceable: If it is no module of PyTorch.
        RewriterError: If torchax is not installed.
    """
    if not isinstance(module, torch.nn.Module):
        raise NotTraceable(
            f"{type(module).__name__}, which is no torch.nn.Module",
            wanted="a module of PyTorch",
            next_step="Use rewriter.optimize for functions of JAX arrays",
            where=caller(),
        )
    torchax()
    return OptimizedModule(module, options)


def explain(module: torch.nn.Module, /, **options: Any) -> Callable[..., Report]:
    """Returns a function of a module's arguments that reports what would be done.

    Modules and tensors on the device "meta" are enough.

    Args:
        module: As in `optimize`.
        **options: As in `optimize`.
    """
    return optimize(module, **options).report


def export(
    module: torch.nn.Module,
    /,
    *,
    platforms: str | Sequence[str] = ("cpu", "cuda", "tpu"),
    **options: Any,
) -> Callable[..., Artifact]:
    """Returns a function of a module's arguments that exports it as StableHLO.

    The program takes a dict of arrays, as in ``state_dict``, and then the arguments as
    arrays. It returns arrays in dicts, lists and tuples.

    Args:
        module: As in `optimize`, or an optimized module.
        platforms: As in ``rewriter.export``.
        **options: As in ``rewriter.export``.

    Raises:
        StateLost: If the module changes its buffers, or draws random numbers.
    """
    fast = module if isinstance(module, OptimizedModule) else optimize(module)
    run = function_of(fast.original)

    def exported(*args: Any, **kwargs: Any) -> Artifact:
        arrays, call = fast._called(args, kwargs)
        state = state_of(fast.original)

        def program(held: dict[str, Any], *arrays: Any) -> Any:
            parts = ({k: held[k] for k in part} for part in state)
            out, returned, changed = run(
                call, State(*parts), jax.random.key(0), [*arrays]
            )
            if returned.drew or changed:
                raise StateLost(
                    f"{fast.name} changes {', '.join(changed) or 'a random state'}",
                    next_step="Call module.eval() before export",
                )
            return returned.structure.plain(out)

        program.__name__ = fast.name
        held = {**state.params, **state.buffers}
        options_ = {**fast.options, **options}
        return export_function(program, platforms=platforms, **options_)(held, *arrays)

    return exported


class OptimizedModule(torch.nn.Module):
    """A module on better kernels; parameters, buffers and names are the module's own.

    Attributes:
        original: The module.
        options: The rewriter's options that were given.
        name: The name of the module's class.
    """

    def __init__(self, module: torch.nn.Module, options: Any) -> None:
        super().__init__()
        own = self.__dict__
        own["original"], own["options"] = module, dict(options)
        own["name"] = type(module).__name__
        for name in (
            "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"
        ):  # fmt: skip
            own[name] = vars(module)[name]  # the same objects: what changes, changes
        fast = optimize_function(function_of(module), **options)
        own["_fast"], own["_vjp"], own["_read"] = fast, with_vjp(fast), Reads()

    @property
    def training(self) -> bool:
        """Whether the module is being trained."""
        return self.original.training if "original" in self.__dict__ else True

    @training.setter
    def training(self, value: bool) -> None:
        if "original" in self.__dict__:
            self.original.training = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.original, name)

    # ------------------------------------------------------------------- calls
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it on tensors. Each call draws one seed of PyTorch's generator."""
        tensors, call = called(self.original, args, kwargs)
        held = tensors_of(self.original)
        leaves = [*held.params.values(), *held.buffers.values(), *tensors]
        here = any(map(on_jax, leaves))
        key = _key()
        if torch.is_grad_enabled() and not here:
            differentiated = [*held.params.values()]
            differentiated += [t for t in tensors if _requires_grad(t)]
            if differentiated:
                return self._recorded(call, key, tensors, differentiated)
        state = state_of(self.original)
        found, returned, changed = self._fast(
            call, state, key, [*map(array_of, tensors)]
        )
        restore(self.original, changed)
        view = torchax().interop.torch_view if here else tensor_of
        return returned.structure.joined([*map(view, found)])

    def _recorded(
        self, call: Called, key: Any, tensors: list[Any], differentiated: list[Any]
    ) -> Any:
        """Calls it, so that autograd can go back through it."""
        state, arrays = state_of(self.original), [*map(array_of, tensors)]
        which = tuple(map(_requires_grad, tensors))
        made = self._vjp(which, call, state, key, arrays)
        restore(self.original, made.changed)
        read = self._read(self._fast, made.kinds, which, call, state, key, arrays)
        floats = iter(recorded(made, [*state.params], read, differentiated))
        others = iter(map(tensor_of, made.others))
        found = [next(floats if kind else others) for kind in made.kinds]
        return made.returned.structure.joined(found)

    # ------------------------------------------------------------------ reports
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Returns the report for these arguments; without any, the latest."""
        if not args and not kwargs:
            return self._fast.report()
        arrays, call = self._called(args, kwargs)
        return self._fast.report(
            call, state_of(self.original), jax.random.key(0), arrays
        )

    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rewritten program for these arguments."""
        arrays, call = self._called(args, kwargs)
        return self._fast.jaxpr(
            call, state_of(self.original), jax.random.key(0), arrays
        )

    def _called(self, args: Any, kwargs: Any) -> tuple[list[Any], Called]:
        tensors, call = called(self.original, args, kwargs)
        return [*map(array_of, tensors)], call

    # ---------------------------------------------------------------------- JAX
    def state(self) -> State:
        """Returns copies of parameters and buffers, as arrays on JAX's device."""
        return state_of(self.original)

    def load(self, state: State) -> None:
        """Gives the module's parameters and buffers the numbers of arrays."""
        restore(self.original, {**state.params, **state.buffers})

    def apply_to(
        self, state: State, *args: Any, key: jax.Array | None = None, **kwargs: Any
    ) -> tuple[Any, State]:
        """Calls it as a pure function of JAX, which ``jax.grad`` and others take.

        Args:
            state: What `state` gave, or a later one.
            *args: The module's arguments, as arrays.
            key: A random key, if the module draws random numbers.
            **kwargs: The module's arguments by name.

        Returns:
            What the module returns, with arrays in dicts, lists and tuples; and the
            state with the buffers that it changed.

        Raises:
            RewriterError: If random numbers were drawn without a key.
        """
        tensors, call = called(self.original, args, kwargs)
        given = jax.random.key(0) if key is None else key
        out, returned, changed = self._fast(
            call, state, given, [*map(array_of, tensors)]
        )
        if returned.drew and key is None:
            raise RewriterError(
                f"{self.name} draws random numbers, and there is no key",
                next_step="Give key=jax.random.key(...), or call module.eval()",
                where=caller(),
            )
        buffers = {k: changed.get(k, v) for k, v in state.buffers.items()}
        return returned.structure.plain(out), State(state.params, buffers)


def _requires_grad(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _key() -> jax.Array:
    """A random key: of torchax where it traces, else of PyTorch's generator."""
    env = torchax().default_env()
    if env.enabled:
        return env.get_and_rotate_prng_key()
    return jax.random.key(int(torch.randint(2**31 - 1, ())))


# -------------------------------------------------------------------------- kernels
def kernel(fn: Callable[..., Any], /) -> Callable[..., Any]:
    """Returns a JAX function, such as a Pallas kernel, as a function of tensors.

    In an optimized module it becomes part of the program. Elsewhere it runs by itself,
    and autograd goes back through it.

    Args:
        fn: A function of arrays. What of its arguments is no tensor is handed on.

    Example:
        >>> import jax.numpy as jnp, torch, rewriter.torch
        >>> root = rewriter.torch.kernel(jnp.sqrt)
        >>> root(torch.full((), 4.0))
        tensor(2.)
    """
    return _Kernel(fn)


class _Kernel:
    """A JAX function as a function of tensors."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        self.module = OptimizedModule(_Calling(self), {"patterns": "none"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it on tensors."""
        env = torchax().default_env()
        if not env.enabled:
            return self.module(*args, **kwargs)
        args, kwargs = torchax().interop.jax_view((args, kwargs))
        return torchax().interop.torch_view(self.fn(*args, **kwargs))


class _Calling(torch.nn.Module):
    """A module that calls a kernel."""

    def __init__(self, called: _Kernel) -> None:
        super().__init__()
        self.called = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        return self.called(*args, **kwargs)
