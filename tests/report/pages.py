"""A report read as a browser reads it: elements with their attributes, and the numbers within."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "img", "path", "use", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def all(self, tag: str = "", name: str = "") -> list["Element"]:
        """Those within that have the tag and the class."""
        found = []
        for child in self.children:
            if tag in ("", child.tag) and (not name or name in child.classes):
                found.append(child)
            found += child.all(tag, name)
        return found

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def words(self) -> str:
        """All text within."""
        return " ".join([self.text, *(child.words for child in self.children)]).strip()


class Page(HTMLParser):
    """Fails if elements are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(source)
        self.close()
        assert self._open == [self.root], "not all elements are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs})
        assert len(element.attributes) == len(attrs)
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs})
        self._open[-1].children.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def panel(self, title: str) -> Element:
        """The plot with this title."""
        (found,) = [
            figure
            for figure in self.root.all("figure")
            if figure.all("h3")[0].text == title and "heat" not in figure.classes
        ]
        return found

    @property
    def titles(self) -> list[str]:
        return [heading.text for heading in self.root.all("h3")]

    @property
    def data(self) -> dict[str, Any]:
        """What the script gets."""
        (script,) = [s for s in self.root.all("script") if s.attributes.get("id") == "data"]
        return json.loads(script.text)


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
