"""Lines of the user's files, and names in profiles."""

from __future__ import annotations

import os
from typing import Any

from jax._src import source_info_util, traceback_util

from rewriter.errors import is_users_own, line_of_file

# Files through which the user's function is called: JAX names none of them as the line
# of an equation, nor in the tracebacks of errors that it hands on.
_BETWEEN = (
    "_jax/jit", "_jax/lowering", "_jax/meshes", "_jax/nvidia", "config",
    "program/trace", "program/placement", "frameworks/nnx_state",
    "frameworks/equinox_modules", "run/analysis", "run/called", "run/optimize",
    "torch", "torch_modules/program", "torch_modules/gradients",
    "torch_modules/lowerings",
)  # fmt: skip
_ENGINE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for _name in _BETWEEN:
    _file = os.path.normpath(os.path.join(_ENGINE, f"{_name}.py"))
    traceback_util.register_exclusion(_file)
    source_info_util.register_exclusion(_file)


def hide_source_folder(folder: str) -> None:
    """Has no line in a folder's files named as the line of an equation."""
    source_info_util.register_exclusion(folder)


def source_of(eqn: Any) -> str:
    """The user's line of an equation, such as ``"model.py:88 (Block.__call__)"``."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else _line(frame)


def users_source_of(eqn: Any) -> str:
    """The innermost line of an equation that is outside of installed packages."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return next((_line(f) for f in frames if _is_users(f.file_name)), "")


_DEMO = os.sep + os.path.join("rewriter", "tools", "demo.py")


def _is_users(file: str) -> bool:
    """Whether a file is the user's own; the demo's model stands for one."""
    return is_users_own(file) or file.endswith(_DEMO)


def _line(frame: Any) -> str:
    """A frame in words."""
    line = line_of_file(str(frame.file_name), frame.start_line)
    return f"{line} ({frame.function_name.split('.<locals>')[0]})"


def is_of_gradient(eqn: Any) -> bool:
    """Whether JAX made an equation by transposing one of the user's."""
    return "transpose(" in str(eqn.source_info.name_stack)


def scoped(source_info: Any, label: str) -> Any:
    """Source info under one more name, as profiles show it."""
    if not label:
        return source_info
    stack = source_info.name_stack.extend(label)
    return source_info.replace(name_stack=stack)
