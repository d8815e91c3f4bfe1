"""Keeps lowered kernels for NVIDIA GPUs on disk, since Pallas takes long to lower them.

A file holds one site's function as `jax.export` serializes it. Its name is a digest of
all that decides the code: this package's files, the use and its kernel with its config,
shapes and dtypes, versions and state of JAX, the device. Where one of these has no
text that says all of it, such as a user's kernel or a mesh, nothing is kept or read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend import backend

from rewriter import _jax
from rewriter.ops.kernel import Kernel
from rewriter.site.uses import Use
from rewriter.support import atomic, cache_folder, fingerprint, regular_files

log = logging.getLogger("rewriter.site")

VARIABLE = "REWRITER_STORE_LOWERED"

PLATFORM = "cuda"

FORMAT = b"rewriter lowered 1\n"

MOST_FILES, REMOVED = 2000, 500
"""With more files than this, so many of the oldest are removed. A file has 10 to
500 kB."""

HELD = 64
"""Kernels that a process holds in memory."""


@dataclass
class _Process:
    """Folders that this process could not write."""

    refused: set[str] = field(default_factory=set)


@functools.cache
def _process() -> _Process:
    return _Process()


def as_stored(
    function: Any, primitive: Any, ctx: Any, params: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns what calls the stored code of a site's function, or the function itself.

    What is not stored yet is lowered now, and stored.

    Args:
        function: The jitted function of the site with its kernel for an NVIDIA GPU.
        primitive: The site's primitive.
        ctx: The context of its lowering rule.
        params: What decides the function: the ``use``, and more.
    """
    folder = cache_folder.lowered()
    use: Use = params["use"]
    if not _is_slow(use.kernel(PLATFORM)) or folder in _process().refused or _is_off():
        return function
    digest = _digest(primitive, ctx, params)
    if digest is None:
        return function
    path = os.path.join(folder, f"{digest}.bin")
    try:
        call = _read(path)
    except (OSError, ValueError) as problem:
        gone = isinstance(problem, (FileNotFoundError, NotADirectoryError))
        log.log(logging.DEBUG if gone else logging.WARNING, "%s: %s", path, problem)
        call = _written(path, function, ctx.avals_in)
    if backend.get_default_device().platform == "gpu":  # Mosaic sets up its compiler
        importlib.import_module("jax.experimental.mosaic.gpu")
    return call


def _is_off() -> bool:
    return os.environ.get(VARIABLE, "1") in ("", "0")


def _is_slow(kernel: Kernel | None) -> bool:
    """Whether a kernel takes long to lower, and is lowered alike everywhere."""
    alone = kernel is not None and kernel.platforms == (PLATFORM,)
    return alone and kernel.traits.exportable and not kernel.traits.needs_devices


# ------------------------------------------------------------------------ the key
def _digest(primitive: Any, ctx: Any, params: Mapping[str, Any]) -> str | None:
    """A text that differs where the lowered code may; None if there is none."""
    state = _jax.lowering_state(ctx, PLATFORM)
    if state is None or not all(map(_is_plain, ctx.avals_in)):
        return None
    avals = [(a.shape, a.dtype) for a in ctx.avals_in]
    more = {k: v for k, v in params.items() if k != "use"}
    try:
        use = _text_of_use(params["use"])
        given = fingerprint.text_of((primitive.name, avals, more))
        package = fingerprint.of_package()
    except (fingerprint.NotPlain, OSError) as problem:
        log.debug("a lowered %s is not stored: %s", primitive.name, problem)
        return None
    text = "\n".join((package, *state, given, use))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_plain(aval: Any) -> bool:
    sized = all(isinstance(d, int) for d in aval.shape)
    return sized and isinstance(aval.dtype, np.dtype) and not aval.weak_type


@functools.lru_cache(maxsize=1024)
def _text_of_use(use: Use) -> str:
    """All of a use that its lowered code for an NVIDIA GPU depends on."""
    op, kernel = use.op, use.kernel(PLATFORM)
    others = [
        (platform, k and (k.name, k.version, k.traits, k.backward is None))
        for platform, k in use.kernels
    ]
    assert kernel is not None
    made = kernel.forward, kernel.backward, kernel.together
    limits = kernel.limits.supports, kernel.limits.deterministic
    return fingerprint.text_of((
        op.name, op.reference, op.general, op.differentiated, op.parallel, op.flat,
        [(o.name, o.axes) for o in op.operands], op.out, op.defaults,
        use.names, use.params, use.falls_back, others,
        kernel.op, kernel.platforms, made, limits,
    ))  # fmt: skip


# ---------------------------------------------------------------------- the files
@functools.lru_cache(maxsize=HELD)
def _read(path: str) -> Callable[..., Any]:
    """A function that calls the code in a file; nothing is remembered of failures."""
    data = regular_files.read_bytes(path)
    if not data.startswith(FORMAT):
        raise ValueError("of another format")
    start = len(FORMAT) + hashlib.sha256().digest_size
    check, code = data[len(FORMAT) : start], data[start:]
    if hashlib.sha256(code).digest() != check:
        raise ValueError("damaged")
    return _calling(jax.export.deserialize(bytearray(code)))


def _calling(exported: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return exported.call(*args)

    run.__name__ = exported.fun_name
    return jax.jit(run)


def _written(path: str, function: Any, avals: Sequence[Any]) -> Callable[..., Any]:
    """Lowers a function and stores it; returns it as it is if that fails."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    try:
        code = _jax.exported(function, PLATFORM, structs).serialize()
    except Exception as problem:  # of exporting, or of the kernel: lowering it will say
        log.debug("a lowered kernel cannot be stored: %s", problem)
        return function
    data = FORMAT + hashlib.sha256(code).digest() + code
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        atomic.write(path, data)
        _remove_oldest(folder)
        return _read(path)
    except (OSError, ValueError) as problem:
        log.debug("lowered kernels are not stored: %s", problem)
        _process().refused.add(folder)
        return function


def _remove_oldest(folder: str) -> None:
    with os.scandir(folder) as found:
        files = [f for f in found if f.name.endswith(".bin")]
    if len(files) > MOST_FILES:
        for file in sorted(files, key=lambda f: f.stat().st_mtime_ns)[:REMOVED]:
            with contextlib.suppress(OSError):  # another process may remove it, too
                os.unlink(file.path)
