"""Pieces of HTML. Whatever comes from a file goes through ``escape``."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


def escape(text: object) -> str:
    """Text as text, in an element or in a quoted attribute."""
    return html.escape(str(text), quote=True)


def embedded_json(value: Any) -> str:
    """JSON for a ``script`` element, which no text within can end."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """A table in a box that scrolls. Cells are HTML already; ``numeric`` columns are aligned."""
    columns = set(numeric)

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=num' if place in columns else ''}>{text}</{tag}>"
            for place, text in enumerate(texts)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th scope=col", list(heads)).replace("</th scope=col>", "</th>")
    return (
        '<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(title: str, content: str, about: str = "") -> str:
    """A part of the page; nothing if it has no content."""
    if not content:
        return ""
    name = title.lower().replace(" ", "-")
    note = f'<p class="about">{escape(about)}</p>' if about else ""
    return f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{note}{content}</section>'
