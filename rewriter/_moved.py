"""Import paths of version 0.1: ``rewriter.kernel`` is `rewriter.ops.kernel` now.

An old path gives the very module of the new one. It goes with version 0.3.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FOLDERS = {
    "support": (
        "verdict atomic promotion threads lock regular=regular_files assumptions"
    ),
    "ops": ("op cost along=splittable kernel estimate registry activations device tpu"),
    "hardware": "ahead_of_time timing profile conditions",
    "program": (
        "trace graph repeats fold constants=equal_constants equations bodies "
        "loops collectives propagation placement"
    ),
    "algebra": "formula emit template normal_form canonicalize",
    "find": (
        "sieve finder region reading anew=recomputable stacked=sliced_operands match "
        "check reference declared bindings pattern"
    ),
    "gradients": "backward_place standing=insertion_point",
    "site": (
        "implementation uses kernel_call levels=vmap_levels implement site "
        "residual_stream shards ring sums=fusable_adds"
    ),
    "measure": (
        "key measurement decision stored=serialized schema tuned cache sources "
        "whole=program_key programs inputs candidate times race isolate "
        "autotune static_cost oracle as_written=original_region leaves=region_inputs "
        "whole_race=end_to_end_race least_time remains=live_products"
    ),
    "verification": (
        "rounding deciding=decision_inputs probes judge compare checked=check_sites"
    ),
    "rewrite": (
        "splice plan pairs=replacements reached=differing_inputs replace locate unfold"
    ),
    "rewrite.passes": (
        "kept=checkpoint_savings recompute absorb=fuse_residual_adds "
        "memory_order policies=checkpoint_policies work=flops "
        "sums_of_parts=adds_into_shards"
    ),
    "choose": (
        "choose choose_sum=residual_add_cost choose_ring special_form parts=composite "
        "planner placing=number_sites"
    ),
    "reports": "report draw",
    "run": "pipeline=rewriting analysis deferred optimize tune verify export",
    "tools": "bench bench_table bench_peers bench_ops roofline demo",
}
"""Folder to the modules that moved there; ``old=new`` for one with another name."""

_VARIANTS = {
    "kernels.attention.paged": "kernels.attention",
    "kernels.attention.paged.cost": "kernels.attention.pages",
    "kernels.attention.paged.estimate": "kernels.attention.hopper_decode.time_model",
    "kernels.attention.paged.hopper": "kernels.attention.hopper_decode.paged",
    "kernels.attention.paged.reference": "kernels.attention.pages",
    "kernels.attention.paged.sharding": "kernels.attention.paged_form",
    "kernels.attention.paged.tpu": "kernels.attention.tpu_pages",
    "kernels.attention.paged.xla": "kernels.attention.xla.gathered",
    "kernels.norms.layer_norm": "kernels.norms",
    "kernels.norms.rms_norm": "kernels.norms",
    "kernels.norms.rows_hopper": "kernels.norms.hopper",
    "kernels.norms.rows_hopper_config": "kernels.norms.hopper_config",
    "kernels.norms.rows_hopper_kernel": "kernels.norms.hopper_kernel",
    "kernels.norms.rows_tpu": "kernels.norms.tpu",
    "kernels.norms.rows_tpu_kernel": "kernels.norms.tpu_kernel",
    "kernels.ragged.quantized_dot": "kernels.ragged.dot",
    "kernels.ragged.quantized_dot.estimate": "kernels.ragged.dot.stored_estimate",
    "kernels.ragged.quantized_dot.hopper": "kernels.ragged.dot.hopper.stored",
    "kernels.ragged.quantized_gated_linear_unit": "kernels.ragged.gated_linear_unit",
    "kernels.ragged.quantized_gated_linear_unit.estimate": (
        "kernels.ragged.gated_linear_unit.stored_estimate"
    ),
    "kernels.ragged.quantized_gated_linear_unit.hopper": (
        "kernels.ragged.gated_linear_unit.hopper_stored"
    ),
    "patterns.ragged.quantized_dot": "patterns.ragged.dot",
    "patterns.ragged.quantized_gated_linear_unit": "patterns.ragged.gated_linear_unit",
}
"""Modules of variants, which are with what they vary now. A folder's modules moved with
it, where they still are modules of their own."""


def moved() -> dict[str, str]:
    """Returns old paths below ``rewriter`` to new ones.

    Example:
        >>> moved()["kernel"]
        'ops.kernel'
    """
    pairs = {}
    for folder, names in _FOLDERS.items():
        for name in names.split():
            old, _, new = name.partition("=")
            if old not in _FOLDERS:  # `site` and `choose` are folders now
                pairs[old] = f"{folder}.{new or old}"
    return pairs | _VARIANTS


class _OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module under its old path, and imports it under its new one."""

    def __init__(self, package: str) -> None:
        self.paths = {f"{package}.{o}": f"{package}.{n}" for o, n in moved().items()}

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns how to load an old path; ``None`` for other names."""
        del path, target
        if self._new(fullname) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module of the new path."""
        module = importlib.import_module(str(self._new(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def _new(self, name: str) -> str | None:
        if name in self.paths:
            return self.paths[name]
        parent, _, last = name.rpartition(".")
        return f"{self.paths[parent]}.{last}" if parent in self.paths else None

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is: it ran under its new path.

        Old paths below it are entered at once. Importing one later would set it as an
        attribute of this very module, in place of another one of its name.
        """
        if module.__spec__ is None:
            return
        below = f"{module.__spec__.name}."
        module.__spec__ = module.__spec__.loader_state
        for old, new in self.paths.items():
            if old.startswith(below) and old not in sys.modules:
                sys.modules[old] = importlib.import_module(new)


def keep_old_paths(package: str) -> None:
    """Lets old import paths of a package resolve.

    A module that is loaded already is entered under its old name at once: importing it
    later would hide the package's function of that name (``rewriter.pattern``).
    """
    finder = _OldPaths(package)
    face = vars(sys.modules[package])
    for old, new in finder.paths.items():
        if new in sys.modules:
            sys.modules.setdefault(old, sys.modules[new])
            if old.count(".") == 1:
                face.setdefault(old.rpartition(".")[2], sys.modules[new])
    sys.meta_path.insert(0, finder)  # first: a folder that moved still has its path
