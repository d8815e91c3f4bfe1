"""A report as HTML: a page of its own, and a fragment for notebooks.

Lines wrap, so that a page reads on a phone. What became of a site has a colour, and the
number of a site is the one in the text and in the picture.
"""

from __future__ import annotations

from html import escape

MARKS = {"✓": "done", "=": "kept", "✗": "missed"}
STYLE = (
    ".rewriter{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.4;margin:0;"
    "padding-left:2ch;text-indent:-2ch;font-family:ui-monospace,monospace}"
    ".rewriter .done{color:#1a7f37}.rewriter .kept{color:#6e7781}"
    ".rewriter .missed{color:#cf222e}.rewriter b{font-weight:600}"
    ".rewriter-report svg{max-width:100%;height:auto}"
)
PAGE = "body{font-family:system-ui;margin:1em;max-width:100ch}svg{margin-top:1em}"


def fragment(text: str, picture: str) -> str:
    """Returns HTML for a notebook: the report, and its picture when asked for.

    Args:
        text: The report as text.
        picture: Its picture as SVG.
    """
    return (
        f"<style>{STYLE}</style><div class='rewriter-report'>{_lines(text)}"
        f"<details><summary>picture</summary>{picture}</details></div>"
    )


def page(name: str, text: str, picture: str) -> str:
    """Returns a self-contained page.

    Args:
        name: The function's name.
        text: The report as text.
        picture: Its picture as SVG.
    """
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(name)}</title><style>{STYLE}{PAGE}</style></head>"
        "<body class='rewriter-report'>"
        f"{_lines(text)}{picture}</body></html>\n"
    )


def _lines(text: str) -> str:
    """The lines of a report, each a block that wraps by itself."""
    return "".join(f"<div class='rewriter'>{_line(n)}</div>" for n in text.split("\n"))


def _line(line: str) -> str:
    mark, body = line[1:2], escape(line) or "&nbsp;"
    if line[:1] != " " or mark not in MARKS:
        return body
    return f"<b class='{MARKS[mark]}'>{body}</b>"
