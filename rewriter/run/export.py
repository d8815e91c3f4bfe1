"""Exports a function as one StableHLO artifact for several platforms, and loads it.

The bytes are plain `jax.export`: running them needs no `rewriter`. Beside them
stands a manifest that lists the swapped-in kernels and their platforms.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import jaxlib
from jax.extend.core import jaxprs_in_params

from rewriter.config import exporting, in_step
from rewriter.errors import (
    DeviceMismatch,
    ExportError,
    RewriterError,
    caller,
    known,
    raised_at,
)
from rewriter.ops import device
from rewriter.ops.registry import REFERENCE
from rewriter.program import trace
from rewriter.reports.report import Report
from rewriter.run.optimize import optimize
from rewriter.site import site
from rewriter.support import atomic

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
FORMAT = 1  # of the manifest
SUFFIX = ".manifest.json"
BACKENDS = {"gpu": ("cuda", "rocm")}  # platforms that jax.default_backend() may mean


@dataclass(frozen=True)
class Artifact:
    """An exported program and its manifest.

    Attributes:
        exported: JAX's own object; ``exported.call`` nests in other programs.
        data: The serialized program.
        manifest: Its content: versions, platforms, SHA-256, sites.
    """

    exported: jax.export.Exported
    data: bytes = field(repr=False)
    manifest: Mapping[str, Any] = field(repr=False)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program; differentiable if exported with ``vjp_order``."""
        return self.exported.call(*args, **kwargs)

    def serialize(self) -> bytes:
        """Returns bytes that `jax.export.deserialize` reads."""
        return self.data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``path`` and ``path.manifest.json``, each in one step.

        Raises:
            ExportError: If the files cannot be written.
        """
        path = os.fspath(path)
        text = json.dumps(self.manifest, indent=1, default=str)
        try:
            atomic.write(path, self.data)
            atomic.write(path + SUFFIX, text.encode())
        except OSError as error:
            raise ExportError(
                f"cannot write {path}: {error.strerror}",
                next_step="Give a path in a folder that exists and can be written",
                where=caller(),
            ) from error


def export(
    fn: Callable[..., Any],
    /,
    *,
    platforms: str | Sequence[str] = ("cpu", "cuda", "tpu"),
    vjp_order: int = 1,
    targets: Mapping[str, str] | None = None,
    **options: Any,
) -> Callable[..., Artifact]:
    """Returns a function from argument specs to an `Artifact`.

    No device of the platforms is needed. Sizes may be symbolic, see
    `jax.export.symbolic_shape`.

    Args:
        fn: Any callable that ``optimize`` takes, or an optimized function.
        platforms: Any of ``cpu``, ``cuda``, ``rocm``, ``tpu``.
        vjp_order: How often the loaded program can be differentiated.
        targets: Platform to device kind, such as ``{"cuda": "NVIDIA H200"}``;
            loading on another kind is then refused.
        **options: As in ``optimize``, if ``fn`` is not optimized yet.

    Raises:
        ExportError: If a platform is unknown, or the program uses something
            that JAX does not export; JAX's error is chained.
        TraceError: If ``fn`` cannot be traced; JAX's error is chained.

    Example:
        >>> import jax, jax.numpy as jnp, rewriter
        >>> spec = jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> artifact = rewriter.export(jnp.sin, platforms=("cpu", "tpu"))(spec)
        >>> artifact.manifest["platforms"]
        ['cpu', 'tpu']
    """
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    _require_known(platforms)
    fast = fn
    if options or not trace.is_optimized(fn):
        fn, lifted = trace.original_of(fn)
        fast = optimize(fn, **{**lifted, **options})
    kinds = {p: device.of(k, p).kind for p, k in (targets or {}).items()}

    @in_step
    def run(*specs: Any, **named: Any) -> Artifact:
        with exporting(kinds):
            report = fast.report(*specs, **named)
            program = fast.jaxpr(*specs, **named)
            try:
                made = jax.export.export(fast, platforms=list(platforms))
                exported = made(*specs, **named)
                data = bytes(exported.serialize(vjp_order=vjp_order))
            except RewriterError:
                raise
            except Exception as error:
                raise _export_error(fn, error) from error
        manifest = _manifest(exported, data, report, vjp_order, kinds)
        manifest["kernels"] = kernels_in(program, exported.platforms)
        return Artifact(exported, data, manifest)

    return run


def _require_known(platforms: Sequence[str]) -> None:
    for name in platforms:
        if name not in PLATFORMS:
            raise ExportError(
                f"no platform {name!r}",
                next_step=known(name, PLATFORMS),
                where=caller(),
            )


def load(path: str | os.PathLike[str], *, any_device: bool = False) -> Artifact:
    """Returns the artifact written by `Artifact.save`.

    Args:
        path: The artifact; its manifest stands beside it.
        any_device: Also load artifacts for other platforms, to inspect them.

    Raises:
        ExportError: If a file is missing, damaged, or of a newer format.
        DeviceMismatch: If it was built for other platforms or devices.

    Example:
        >>> import os, tempfile
        >>> import jax, jax.numpy as jnp, rewriter
        >>> spec = jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> artifact = rewriter.export(jnp.sin, platforms=("cpu",))(spec)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "sine")
        ...     artifact.save(path)
        ...     loaded = rewriter.load(path, any_device=True)
        >>> loaded.manifest["platforms"]
        ['cpu']
    """
    path = os.fspath(path)
    data, manifest = _read(path), _read_manifest(path + SUFFIX)
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.get("sha256"):
        raise ExportError(
            f"{path} is damaged: its SHA-256 is {digest[:12]}…",
            wanted=f"{str(manifest.get('sha256'))[:12]}… as {path + SUFFIX} says",
            next_step="Copy both files again, or export again",
        )
    if not any_device:
        _check_device(path, manifest)
    try:
        exported = jax.export.deserialize(bytearray(data))
    except Exception as error:
        made, here = manifest.get("jax"), jax.__version__
        raise ExportError(
            f"jax {here} cannot read {path}, written by jax {made}: {error}",
            next_step="Export again, or use the jax that wrote it",
        ) from error
    return Artifact(exported, data, manifest)


# ----------------------------------------------------------------- manifest
def _manifest(
    exported: jax.export.Exported,
    data: bytes,
    report: Report,
    vjp_order: int,
    targets: Mapping[str, str],
) -> dict[str, Any]:
    said = report.as_dict()
    return {
        "format": FORMAT,
        "function": report.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "calling_convention": exported.calling_convention_version,
        "platforms": list(exported.platforms),
        "targets": dict(targets),
        "vjp_order": vjp_order,
        "inputs": [str(a) for a in exported.in_avals],
        "outputs": [str(a) for a in exported.out_avals],
        "custom_calls": custom_calls(exported.mlir_module()),
        "numerics": report.numerics,
        "sites": said["sites"],
        "fallbacks": said["misses"] + said["failures"],
    }


def kernels_in(program: Any, platforms: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the kernels of a rewritten program's sites on each platform.

    Args:
        program: Its jaxpr.
        platforms: The platforms to ask for.

    Returns:
        For each op and choice of kernels: its name, the number of sites in the
        program's text, and the kernel by platform. ``"reference"`` is the op in plain
        JAX.
    """
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    bodies = [program]
    while bodies:
        body = bodies.pop()
        for eqn in getattr(body, "jaxpr", body).eqns:
            bodies += jaxprs_in_params(eqn.params)
            if eqn.primitive.name == site.site_p.name:
                use = eqn.params["use"]
                names = (getattr(use.kernel(p), "name", REFERENCE) for p in platforms)
                found[use.op.name, tuple(names)] += 1
    return [
        {"op": op, "sites": n, "by_platform": dict(zip(platforms, names, strict=True))}
        for (op, names), n in found.items()
    ]


def custom_calls(module: str) -> list[str]:
    """Returns the custom-call targets in the text of a StableHLO module."""
    return sorted(set(re.findall(r"custom_call @([\w.]+)", module)))


def _export_error(fn: Any, error: Exception) -> ExportError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    hints = {
        "serializ": "Pass plain tuples, lists and dicts, or register the type "
        "with jax.export.register_pytree_node_serialization",
        "custom call": "Ask for fewer platforms, or leave out the pattern",
    }
    hint = next((h for k, h in hints.items() if k in str(error).lower()), "")
    return ExportError(
        f"{trace.name_of(fn)} cannot be exported: {type(error).__name__}: {text}",
        next_step=hint or "The cause is above; jax.export stops at the same place",
        where=raised_at(error),
    )


# -------------------------------------------------------------------- files
def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ExportError(
            f"cannot read {path}: {error.strerror}",
            next_step="save() writes two files, the program and its manifest; "
            "keep them together",
        ) from error


def _read_manifest(path: str) -> dict[str, Any]:
    try:
        manifest = json.loads(_read(path))
    except ValueError as error:
        raise ExportError(
            f"{path} is damaged: {error}", next_step="Copy it again, or export again"
        ) from error
    got = manifest.get("format") if isinstance(manifest, dict) else None
    if got != FORMAT:
        raise ExportError(
            f"{path} has format {got}",
            wanted=str(FORMAT),
            next_step="Export again with this version",
        )
    return dict(manifest)


def _check_device(path: str, manifest: Mapping[str, Any]) -> None:
    backend = jax.default_backend()
    mine = BACKENDS.get(backend, (backend,))
    platforms = manifest.get("platforms", [])
    if not set(mine) & set(platforms):
        raise DeviceMismatch(
            f"{path} was built for {', '.join(platforms)}, this is {backend}",
            next_step=f"Export again with platforms={(*platforms, mine[0])!r}",
        )
    kind = jax.devices()[0].device_kind
    for name, target in manifest.get("targets", {}).items():
        if name in mine and target != kind:
            raise DeviceMismatch(
                f"{path} was built for {target}, this is {kind}",
                next_step=f"Export again with targets={{{name!r}: {kind!r}}}",
            )
