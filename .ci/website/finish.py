"""Finish the built site: formulas become MathML, and every link is checked.

``python .ci/website/finish.py build/site`` prints how many links were checked, and those that lead nowhere: pages,
files and anchors have to exist, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
# Tags that load what they name; a link may lead out of the site, these may not.
_LOADING = {"script", "img", "link", "iframe", "source"}


def with_formulas(page: str) -> str:
    """A page with its formulas as MathML, which browsers show by themselves."""

    def formula(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return str(convert(html.unescape(found[2]).strip()[2:-2].strip(), display=display))

    return _FORMULA.sub(formula, page)


class Links(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep links and anchors."""
        given = dict(attrs)
        self.anchors |= {given[key] or "" for key in ("id", "name") if given.get(key)}
        target = given.get("href") or given.get("src")
        if target:
            (self.loaded if tag in _LOADING else self.links).append(target)


def broken_links(site: Path) -> tuple[int, list[str]]:
    """How many links within a site were checked, and those that lead nowhere or load from elsewhere."""
    pages = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = page = Links()
        page.feed(path.read_text(encoding="utf-8"))
    broken, checked = [], 0
    for path, page in pages.items():
        shown = path.relative_to(site.resolve())
        broken += [f"{shown}: loads {one}" for one in page.loaded if urlsplit(one).netloc]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            found = target.exists() and (target not in pages or unquote(parts.fragment) in pages[target].anchors)
            broken += [] if found else [f"{shown}: {link}"]
    return checked, broken


def main(site: str) -> int:
    """Change the pages, and print what was found."""
    for path in Path(site).rglob("*.html"):
        path.write_text(with_formulas(path.read_text(encoding="utf-8")), encoding="utf-8")
    checked, broken = broken_links(Path(site))
    sys.stdout.write("".join(f"broken: {one}\n" for one in broken) + f"{checked} links checked, {len(broken)} broken\n")
    return int(bool(broken) or not checked)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
