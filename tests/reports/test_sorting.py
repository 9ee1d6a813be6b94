"""The script of a page sorts its tables; run in node on a stand-in for the elements that it touches."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from robust_ext import reports

SCRIPT = Path(reports.__file__).parent / "sort.js"
# Elements as the script uses them, and a click on the title of a column.
DOCUMENT = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
class Element {
  constructor(text = "", classes = []) {
    this.textContent = text; this.childNodes = [text]; this.attributes = {}; this.clicked = [];
    this.classes = new Set(classes);
    this.classList = { add: (one) => this.classes.add(one), contains: (one) => this.classes.has(one) };
  }
  querySelector() { return this.data; }
  append(...nodes) { this.appended = [...(this.appended ?? []), ...nodes]; if (this.rows) this.rows = nodes; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = value; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener(kind, does) { this.clicked.push([kind, does]); }
}
const titles = given.titles.map((title) => new Element(title, title === title.toLowerCase() ? ["number"] : []));
const body = new Element();
body.rows = given.rows.map((cells) => ({ cells: cells.map((cell) => {
  const made = new Element(String(cell.text ?? cell));
  made.data = cell.data === undefined ? null : { value: cell.data };
  return made;
}) }));
const table = new Element();
table.tBodies = [body]; table.tHead = { rows: [{ cells: titles }] };
globalThis.document = { querySelectorAll: () => [table], createElement: () => new Element() };
require("vm").runInThisContext(require("fs").readFileSync(given.script, "utf8"));
const shown = given.clicks.map((column) => {
  const button = titles[column].appended.at(-1);
  for (const [kind, does] of button.clicked) if (kind === "click") does();
  return [body.rows.map((row) => row.cells[0].textContent), titles.map((title) => title.getAttribute("aria-sort"))];
});
const buttons = titles.map((title) => title.appended?.at(-1).type ?? null);
console.log(JSON.stringify({ shown, sorts: table.classes.has("sorts"), buttons }));
"""
ROWS = [
    ["pgd 10", {"text": "0.613 [0.555, 0.669]"}, "1,024", "4+"],
    ["PGD 9", {"text": "≤ 9.1", "data": "0.091"}, "-", "2"],
    ["apgd", {"text": "100.0", "data": "1.0"}, "87", "10"],
    ["Square", "-", "2e3", "-"],
]
BY = [["apgd", "PGD 9", "pgd 10", "Square"], ["PGD 9", "pgd 10", "apgd", "Square"]]
BY += [["apgd", "pgd 10", "Square", "PGD 9"], ["PGD 9", "pgd 10", "apgd", "Square"]]
FIRST = [row[0] for row in ROWS]


def run(clicks, rows=ROWS, titles=("Attack", "score", "passes", "depth", "")):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    given = {"titles": titles, "rows": [[*row, ""] for row in rows], "clicks": clicks, "script": str(SCRIPT)}
    done = subprocess.run([node, "-e", DOCUMENT], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("column", range(4))
def test_a_click_sorts_up_then_down_then_as_it_was(column):
    """Numbers by value, also behind words and of ``data``; names as people order them; what is missing last."""
    found = run([column] * 4)
    (up, _), (down, _), (back, _), (again, _) = found["shown"]
    assert up == BY[column] == again
    missing = up[len(up) - sum(row[column] == "-" for row in ROWS) :]
    assert down == [*reversed(up[: len(up) - len(missing)]), *missing]
    assert back == FIRST
    states = [one[column] for _, one in found["shown"]]
    assert states == ["ascending", "descending", None, "ascending"]


def test_only_one_column_is_sorted_by_and_only_where_there_is_something_to_sort():
    # It writes no markup, and reaches nothing.
    banned = ("innerHTML", "insertAdjacent", "eval", "fetch", "http", "</", "Function(")
    assert not any(word in SCRIPT.read_text(encoding="utf-8") for word in banned)
    found = run([1, 2])
    assert found["shown"][-1] == [BY[2], [None, None, "ascending", None, None]]
    assert found["buttons"] == ["button"] * 4 + [None]
    alone = run([], rows=ROWS[:1])
    assert (alone["sorts"], alone["buttons"]) == (False, [None] * 5)
