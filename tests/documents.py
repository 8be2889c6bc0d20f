"""What is in the documents: code blocks with their languages, headings, links.

A block that is not to be run has a reason in the line before it, which no reader sees::

    <!-- not run: it needs two hosts; tests/test_launch_files.py runs the same on one -->
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(file for folder in ("docs", "kernels") for file in (ROOT / folder).rglob("*.md")),
]
"""All of them: a new one is tested without being named here."""

_FENCE = re.compile(r"^ *(`{3,})(.*)$")
_EXCUSE = re.compile(r"^ *<!-- not run: (.+) -->$")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A code block of a document."""

    document: Path
    line: int
    """Of its first line, from 1."""
    language: str
    title: str | None
    """The file that the reader is to write it to."""
    text: str
    excuse: str | None
    """Why it is not run."""

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """The code blocks of a document, in order."""
    found = []
    lines = document.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        excuse = _EXCUSE.match(before)
        first = number + 1
        end = next(index for index in range(first, len(lines)) if lines[index].strip() == fence[1])
        language, _, rest = fence[2].strip().partition(" ")
        title = _TITLE.search(rest)
        indent = len(lines[number]) - len(lines[number].lstrip())
        text = "".join(line[indent:] + "\n" for line in lines[first:end])
        found.append(
            Block(
                document,
                first + 1,
                language,
                title[1] if title else None,
                text,
                excuse[1] if excuse else None,
            )
        )
        number = end + 1
    return found


def prose(document: Path) -> str:
    """Its text without code blocks."""
    text = document.read_text(encoding="utf-8")
    return re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(document: Path) -> list[tuple[str, str]]:
    """(path, anchor) of each link that does not lead to the web; either may be empty."""
    text = re.sub(r"`[^`\n]*`", "", prose(document))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets = [target for target in targets if not re.match(r"[a-z]+:", target)]
    return [(path, anchor) for path, _, anchor in (target.partition("#") for target in targets)]


def anchors(document: Path) -> set[str]:
    """What the headings of a document are called in links, as repository browsers make it."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(document), re.MULTILINE):
        explicit = re.search(r"\{ *#([\w.-]+)[^}]*\}$", heading)
        if explicit:
            found.add(explicit[1])
            continue
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        again = sum(
            1 for one in found if one == name or re.fullmatch(rf"{re.escape(name)}-\d+", one)
        )
        found.add(f"{name}-{again}" if again else name)
    return found


def commands(block: Block) -> list[str]:
    """The commands of megabit in a block of shell, each on one line."""
    joined = block.text.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return [line for line in lines if line.startswith("megabit ")]


def command_of(words: list[str]) -> str:
    """``train`` or ``bench train`` of the words after ``megabit``."""
    grouped = ("bench", "ckpt", "export", "import", "inject")
    return " ".join(words[: 2 if words[0] in grouped else 1])
