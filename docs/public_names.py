"""Writes the page of the public names from the docstrings of the package."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import rewriter

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
GROUPS = {
    "Optimize and look": ("optimize", "explain", "Optimized", "Report", "Difference"),
    "Check and measure": (
        "verify", "Verification", "benchmark", "Benchmark", "tune", "Tuned", "cache",
    ),
    "Options": ("config", "using", "Config"),
    "Your own patterns": (
        "pattern", "Pattern", "register", "scalar", "Candidate", "Space",
    ),
    "Export": ("export", "load", "Artifact"),
}  # fmt: skip
"""Headings of the page, and the names below each; errors come last."""


def page() -> str:
    """Returns the whole page, without its title."""
    parts = []
    errors = [n for n, thing in vars(rewriter).items() if _is_error(thing)]
    for heading, names in {**GROUPS, "Errors and warnings": tuple(errors)}.items():
        parts.append(f"## {heading}")
        parts += [part for name in names for part in _described(name)]
    return "\n\n".join(parts)


def public() -> list[str]:
    """Returns the names that the package exports, modules apart."""
    names = [n for n in vars(rewriter) if not n.startswith("_")]
    found = [n for n in names if not inspect.ismodule(getattr(rewriter, n))]
    return [*found, "cache"]


def arguments(docstring: str, section: str) -> dict[str, str]:
    """Returns what a section of a docstring says of each name, on one line each."""
    return dict(_items(_sections(inspect.cleandoc(docstring)).get(section, "")))


def _is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, (Exception, Warning))


def _described(name: str) -> Iterator[str]:
    thing = getattr(rewriter, name)
    yield f"### `{name}`"
    if _is_error(thing):
        yield _plain(inspect.cleandoc(thing.__doc__ or ""))
        return
    if inspect.isfunction(thing):
        yield _code("text", f"rewriter.{name}{_signature(thing)}")
    yield from _of_docstring(thing)
    members = vars(thing).items() if inspect.isclass(thing) or name == "cache" else ()
    methods = [(n, m) for n, m in members if _is_method(n, m, thing)]
    if methods:
        lines = [f"- `{n}{_call(m)}`: {_first(m)}" for n, m in methods]
        yield "\n".join(lines)


def _is_method(name: str, member: Any, owner: Any) -> bool:
    if name.startswith("_") or not getattr(member, "__doc__", None):
        return False
    if inspect.ismodule(owner):
        return inspect.isfunction(member) and member.__module__ == owner.__name__
    return inspect.isfunction(member) or isinstance(member, (property, classmethod))


def _call(member: Any) -> str:
    if isinstance(member, property):
        return ""
    return _signature(getattr(member, "__func__", member), typed=False)


def _signature(function: Any, typed: bool = True) -> str:
    found = inspect.signature(function)
    none = inspect.Parameter.empty
    values = [
        p.replace(annotation=p.annotation if typed and _is_named(p) else none)
        for n, p in found.parameters.items()
        if n not in ("self", "cls")
    ]
    back = found.return_annotation if typed else none
    whole = found.replace(parameters=values, return_annotation=back)
    text = _named(str(whole).replace("'", "") if typed else str(whole))
    if not typed or len(text) < 72:
        return text
    lines = []
    for p in values:
        if p.kind is p.KEYWORD_ONLY and "*," not in lines:
            lines.append("*,")
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        lines.append(_named(f"{mark}{str(p).lstrip('*')},".replace("'", "")))
        if p.kind is p.POSITIONAL_ONLY and "/," not in lines:
            lines.append("/,")
    arrow = "" if back is none else f" -> {back}".replace("'", "")
    return "(\n" + "".join(f"    {line}\n" for line in lines) + f"){arrow}"


def _named(text: str) -> str:
    """Functions among defaults by their names, without their addresses."""
    return re.sub(r"<(?:function|class) '?([\w.]+)'?(?: at \w+)?>", r"\1", text)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _first(member: Any) -> str:
    text = inspect.cleandoc(getattr(member, "__doc__", "") or "")
    return _plain(text.split("\n\n")[0])


def _of_docstring(thing: Any) -> Iterator[str]:
    found = _sections(inspect.cleandoc(thing.__doc__ or ""))
    if found[""]:
        yield "\n\n".join(_plain(p) for p in found[""].split("\n\n"))
    for section in SECTIONS:
        if section not in found:
            continue
        if section == "Example":
            yield _code("pycon", inspect.cleandoc(found[section]))
        elif section in ("Returns", "Yields"):
            yield f"{section}: {_plain(found[section])}"
        else:
            lines = [f"- `{n}`: {text}" for n, text in _items(found[section])]
            yield f"{section}:\n\n" + "\n".join(lines)


def _sections(text: str) -> dict[str, str]:
    """What stands under each heading of a docstring; under "" what is before them."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.M)
    found = {"": parts[0].strip()}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        inside, after = [], []
        for line in body.splitlines():
            (after if after or (line and line[0] != " ") else inside).append(line)
        found[name] = inspect.cleandoc("\n".join(["", *inside]))
        found[""] += "\n\n" + "\n".join(after) if after else ""
    return found


def _items(text: str) -> Iterator[tuple[str, str]]:
    for item in re.split(r"\n(?=\S)", text.strip()):
        name, _, about = item.partition(":")
        yield name.strip(), _plain(about)


def _plain(text: str) -> str:
    """One paragraph on one line, with Markdown's code marks."""
    return re.sub(r"\s+", " ", text.strip()).replace("``", "`").replace("|", "\\|")


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
