"""For mkdocs: links that leave ``docs/`` lead to pages of the site, as they lead to files in a
repository's browser.

A document links to ``../kernels/README.md`` or ``../examples/launch/n_hosts.sh``. For each file of
the repository that is linked to, the site gets a page: Markdown as it is, a folder as a list of its
files, any other text as a block of code; pictures are copied. Links in those pages are treated in
the same way. The documents themselves stay as they are.

Data in: the documents, mkdocs' files. Out: more files, and each page's Markdown with other targets.
Source: mkdocs, "Hooks" and "Events" of its user guide.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = Path(__file__).resolve().parent
PREFIX = "repository"
"""Folder of the site for what is from outside ``docs/``."""
PICTURES = (".png", ".svg", ".jpg")
LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".sbatch": "sh",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".c": "c",
    ".h": "c",
}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a file for each path outside ``docs/`` that a document, or such a file, links to."""
    waiting = [
        Path(file.abs_src_path)
        for file in files.documentation_pages()
        if file.abs_src_path is not None
    ]
    seen: set[Path] = set()
    while waiting:
        document = waiting.pop()
        for target in _links(document.read_text(encoding="utf-8")):
            path = _outside(document.parent, target)
            if path is None or path in seen:
                continue
            seen.add(path)
            uri = _uri(path)
            if path.suffix in PICTURES:
                files.append(File.generated(config, uri, content=path.read_bytes()))
                continue
            files.append(File.generated(config, uri, content=_page(path)))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The same text, with links that lead to the pages of ``on_files``."""
    uri = page.file.src_uri
    source = DOCS / uri
    if uri.startswith(f"{PREFIX}/"):
        source = ROOT / uri.removeprefix(f"{PREFIX}/")
        if source.suffix == ".md" and not source.exists():
            return markdown  # made of a file that is not Markdown: its links are right
    here = posixpath.dirname(uri)

    def aim(link: re.Match[str]) -> str:
        path = _outside(source.parent, link[2])
        if path is None and not uri.startswith(f"{PREFIX}/"):
            return link[0]
        if path is not None:
            target = _uri(path)
        elif _is_web(link[2]):
            return link[0]
        else:  # from a page outside back into docs/
            target = os.path.relpath((source.parent / link[2]).resolve(), DOCS)
        return link[1] + posixpath.relpath(target, here or ".") + link[3]

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(aim, part) for index, part in enumerate(parts))


def _links(markdown: str) -> list[str]:
    return [link[1] for link in _LINK.findall(_FENCE.sub("", markdown))]


def _is_web(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def _outside(folder: Path, target: str) -> Path | None:
    """The path that is linked to, if it is in the repository and not in ``docs/``."""
    if _is_web(target):
        return None
    path = (folder / target).resolve()
    inside = path.is_relative_to(ROOT) and path != ROOT and not path.is_relative_to(DOCS)
    return path if inside and path.exists() else None


def _uri(path: Path) -> str:
    """Of the page, or picture, that shows a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in (*PICTURES, ".md"):
        return f"{PREFIX}/{name}"
    return f"{PREFIX}/{name}/contents.md" if path.is_dir() else f"{PREFIX}/{name}.md"


def _page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.is_dir():
        hidden = ("__pycache__", ".")
        names = sorted(item.name for item in path.iterdir() if not item.name.startswith(hidden))
        return f"# {name}\n\n" + "".join(f"- `{item}`\n" for item in names)
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
