"""Write the pages of the documentation site: those of docs/, the top-level ones, and files that they link to.

``python .ci/website/stage.py`` writes ``build/docs``, from which mkdocs builds, and ``build/package``, in which
``adapters/`` lies where it is installed. Pages are plain Markdown that reads well on GitHub; what differs on the site
is changed here: links to files of the repository lead to pages that show them, and sections between
``<!-- tabs -->`` and ``<!-- end of tabs -->`` become tabs.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import textwrap
from pathlib import Path

import tutorials
from docstrings import for_the_site
from reference import links, public_names, reference_pages

ROOT = Path(__file__).parents[2]
# Pages that lie outside docs/, and where they are on the site.
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TOP["SECURITY.md"] = "security.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".txt": "text", "": "text"}


def stage(root: Path, to: Path) -> None:
    """Write all pages to a folder, which is emptied first."""
    shutil.rmtree(to, ignore_errors=True)
    docs = root / "docs"
    sources = {path.relative_to(docs).as_posix(): path for path in docs.rglob("*") if path.is_file()}
    sources |= {name: root / top for top, name in TOP.items()}
    linked: set[Path] = set()
    for name, path in sources.items():
        if path.suffix == ".md":
            # Whoever searches has a task: pages of one task come before those that mention it.
            boost = "---\nsearch:\n  boost: 3\n---\n\n" if name.startswith("howto/") else ""
            _write(to / name, boost + _page(path.read_text(encoding="utf-8"), path, root, name, linked))
        elif path.suffix == ".py":
            _stage_tutorial(path, root, name, to, linked)
        elif path.suffix != ".json":
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to / name)
    for name, text in reference_pages(root).items():
        _write(to / "reference" / name, text)
    for path in linked:
        _write(to / _shown_at(path, root), _file_page(path, root))
    shutil.copyfile(Path(__file__).with_name("site.css"), to / "site.css")


def _stage_tutorial(script: Path, root: Path, name: str, to: Path, linked: set[Path]) -> None:
    """A notebook that is kept as a script: a page, with what it drew and saved where that is kept, and the script."""
    kept = tutorials.kept(script, root)
    text = tutorials.page(script) if kept is None else (kept / "page.md").read_text(encoding="utf-8")
    shown = _page(text, script, root, name, linked)
    reports = [] if kept is None else sorted(kept.glob("*.html"))
    list_of_them = "".join(f"- [{one.stem.replace('-', ' ')}]({one.name})\n" for one in reports)
    found = f"\n## Reports that were saved\n\n{list_of_them}" if reports else ""
    _write(to / _page_name(name), f"{shown}{found}\n[This page as a script]({script.name})\n")
    for file in (script, *reports, *(() if kept is None else kept.glob("*.svg"))):
        shutil.copyfile(file, to / name.rpartition("/")[0] / file.name)


def _write(page: Path, text: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def _page(text: str, path: Path, root: Path, name: str, linked: set[Path]) -> str:
    """A page with its links changed outside code blocks, and its tabs; adds files that it links to to ``linked``."""
    folder = posixpath.dirname(name) or "."

    def link(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = (path.parent / target).resolve()
        return opening + posixpath.relpath(_place(file, root, linked), folder) + anchor + closing

    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = (_LINK.sub(link, part) for part in parts[::2])
    # Highlighting is by the first word after the fence.
    parts[1::2] = (re.sub(r"^( *```\w+)[^\n]*", r"\1", part) for part in parts[1::2])
    return _TABS.sub(lambda found: tabs(found[1]), "".join(parts))


def _page_name(name: str) -> str:
    """Notebooks that are kept as scripts become pages."""
    return f"{name.removesuffix('.py')}.md" if name.endswith(".py") else name


def _place(file: Path, root: Path, linked: set[Path]) -> str:
    """Where a file of the repository is on the site; those that are no pages get one that shows them."""
    name = file.relative_to(root).as_posix()
    if name in TOP:
        return TOP[name]
    if name.startswith("docs/"):
        return _page_name(name.removeprefix("docs/"))
    if file.is_file():
        linked.add(file)
    return _shown_at(file, root)


def _shown_at(file: Path, root: Path) -> str:
    return f"files/{file.relative_to(root).as_posix()}.md"


def _file_page(path: Path, root: Path) -> str:
    """A file as a page, which the search leaves out."""
    language = _LANGUAGES.get(path.suffix, "text")
    code = path.read_text(encoding="utf-8").rstrip()
    name = path.relative_to(root).as_posix()
    return f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n````{language}\n{code}\n````\n"


def tabs(text: str) -> str:
    """Sections of the second or third level as tabs: ``=== "Title"`` and the indented section."""
    level = re.search(r"^(#{2,4}) ", text, re.MULTILINE)
    if level is None:
        raise ValueError("no headings between <!-- tabs --> and <!-- end of tabs -->")
    _, *sections = re.split(rf"^{level[1]} +(.*)\n", text, flags=re.MULTILINE)
    shown = []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        indented = textwrap.indent(body.strip("\n"), " " * 4)
        shown.append(f'=== "{title.strip()}"\n\n{indented}\n\n')
    return "".join(shown)


def copy_package(root: Path, to: Path) -> None:
    """The package as it is installed, with docstrings in Markdown; they are read without importing it."""
    shutil.rmtree(to, ignore_errors=True)
    known = links(public_names(root))
    for top, place in (("robust_ext", to / "robust_ext"), ("adapters", to / "robust_ext" / "adapters")):
        for file in (root / top).rglob("*.py*"):
            if file.suffix in (".py", ".pyi"):
                code = for_the_site(file.read_text(encoding="utf-8"), known)
                _write(place / file.relative_to(root / top), code)


if __name__ == "__main__":
    copy_package(ROOT, ROOT / "build" / "package")
    stage(ROOT, ROOT / "build" / "docs")
