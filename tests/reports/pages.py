"""Pages as tests read them: elements, tables, the words of plots, and all of it as a few lines of plain text."""

import base64
import html
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

NASTY = "<script>alert(1)</script>\"'&$x_{1}$ \x00\x1b\ud800 攻撃 name-0 {{ seed }}"
"""What must not become markup, an escape of a terminal, or a name in a plot."""

SVG = "{http://www.w3.org/2000/svg}"
_BLOCKS = "title|h[1-4]|p|li|dt|dd|figcaption|caption|summary|tr|img"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.text, self.rows = [], [], "", []
        self._hidden, self._in_cell = 0, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes.extend((tag, key, value) for key, value in attributes)
        self._hidden += tag in ("style", "script")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._hidden -= tag in ("style", "script")
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if not self._hidden:
            self.text += data
            if self._in_cell:
                self.rows[-1][-1] += data

    def row(self, *start):
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        (found,) = [row[len(start) :] for row in rows if tuple(row[: len(start)]) == start]
        return found


def svgs(text):
    found = []
    for image, label in re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)" alt="([^"]*)"', text):
        found.append(ElementTree.fromstring(base64.b64decode(image)))
        found[-1].set("aria-label", html.unescape(label))
    return found


def words(svg):
    return ["".join(element.itertext()) for element in svg.iter(f"{SVG}text")]


def plot(text, start):
    (svg,) = [svg for svg in svgs(text) if svg.get("aria-label", "").startswith(start)]
    return svg


def ends(svg, colour):
    found = []
    for path in svg.iter(f"{SVG}path"):
        if re.search(rf"fill: (var\(--c\w+, )?({colour})", path.get("style", "")):
            across = [float(x) for x in re.findall(r"[ML] (\S+) ", path.get("d"))]
            found.append((min(across), max(across)))
    return found


def outline(text):
    """What a page shows, a line a heading, paragraph, row, plot or image: marked by its element, without styles."""
    plots = iter(svgs(text))
    text = re.sub(r"<(style|script).*?</\1>|<svg[^>]*aria-hidden.*?</svg>", "", text, flags=re.DOTALL)
    block = rf"<({_BLOCKS})\b([^>]*)>(.*?)(?=<(?:{_BLOCKS})\b|</table>|\Z)"
    lines = []
    for tag, attributes, body in re.findall(block, text, flags=re.DOTALL):
        if tag == "img":
            body = re.search(r'alt="([^"]*)"', attributes)[1]
            body += f": {' / '.join(words(next(plots)))}" if "svg" in attributes else ""
        body = re.sub(r"</t[dh]>\s*<t[dh][^>]*>", " | ", body)
        body = " ".join(re.sub(r"<[^>]*>", " ", body).split())
        lines.append(f"{tag}: {body}")
    return "\n".join(line for line in lines if not line.endswith(": ")) + "\n"
