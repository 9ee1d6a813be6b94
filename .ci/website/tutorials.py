"""Pages of the tutorials: scripts in jupytext's percent format, with what they print and draw as notebooks.

``python .ci/website/tutorials.py`` runs every tutorial that has changed since it was run last, or all where the package
has, and keeps their pages, their figures and the reports that they save in ``build/tutorials``, from where ``stage.py``
takes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
# Figures that scale; a notebook's own are drawn at 72 dots an inch.
_FIRST = "%config InlineBackend.figure_formats = ['svg']"
_SECONDS = 600


def scripts(root: Path) -> list[Path]:
    """The tutorials, in order."""
    return sorted((root / "docs" / "tutorials").glob("[0-9]*.py"))


def kept(script: Path, root: Path) -> Path | None:
    """The folder with the page of a tutorial and its figures; None where it was not run as it is now."""
    folder = root / "build" / "tutorials" / script.stem
    key = folder / "key"
    return folder if key.is_file() and key.read_text(encoding="utf-8") == _key(script, root) else None


def page(script: Path, outputs: Iterable[str] = ()) -> str:
    """A tutorial as Markdown; ``outputs`` follow its cells of code, in order."""
    parts, results = [], iter(outputs)
    for code, source in cells(script.read_text(encoding="utf-8")):
        parts.append(f"```python\n{source}\n```\n\n{next(results, '')}" if code else f"{source}\n")
    return "\n".join(parts)


def cells(text: str) -> list[tuple[bool, str]]:
    """The cells of a script: whether each is code, and its source."""
    _, *parts = _CELL.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [
        (not mark, source.strip() if not mark else re.sub("^# ?", "", source.strip(), flags=re.M))
        for mark, source in pairs
    ]


def run(script: Path, root: Path) -> float:
    """Run a tutorial and keep its page and figures; the seconds that it took."""
    import nbformat
    from nbclient import NotebookClient

    begun, folder = time.perf_counter(), root / "build" / "tutorials" / script.stem
    sources = [source for code, source in cells(script.read_text(encoding="utf-8")) if code]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (_FIRST, *sources)])
    with tempfile.TemporaryDirectory() as empty:
        resources = {"metadata": {"path": empty}}
        limits = {"timeout": _SECONDS, "startup_timeout": _SECONDS}
        quiet = ["--log-level=40"]
        NotebookClient(notebook, kernel_name="python3", extra_arguments=quiet, resources=resources, **limits).execute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for report in Path(empty).glob("*/report.html"):
            shutil.copyfile(report, folder / f"{report.parent.name}.html")
    figures: list[str] = []
    outputs = [_shown(cell.outputs, figures, script.stem) for cell in notebook.cells[1:]]
    for number, figure in enumerate(figures, 1):
        (folder / f"{script.stem}-{number}.svg").write_text(figure, encoding="utf-8")
    (folder / "page.md").write_text(page(script, outputs), encoding="utf-8")
    (folder / "key").write_text(_key(script, root), encoding="utf-8")
    return time.perf_counter() - begun


def _shown(outputs: Iterable[Any], figures: list[str], stem: str) -> str:
    """The outputs of a cell as Markdown; its figures are added to ``figures``."""
    text, drawn = "", ""
    for one in outputs:
        if one.output_type == "stream":
            text += one.text
        elif "image/svg+xml" in one.data:
            figures.append(one.data["image/svg+xml"])
            drawn += f"![Figure {len(figures)}]({stem}-{len(figures)}.svg)\n"
    return (f"```text\n{text.rstrip()}\n```\n\n" if text else "") + drawn


def _key(script: Path, root: Path) -> str:
    """A digest of the script, of the package's code and weights, and of what runs and shows it."""
    digest = hashlib.sha256()
    package = (
        path
        for top in ("robust_ext", "adapters")
        for path in (root / top).rglob("*")
        if "__pycache__" not in path.parts
    )
    digest.update(Path(__file__).read_bytes())
    for path in (script, root / "constraints.txt", *sorted(path for path in package if path.is_file())):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Run what has changed, two at a time."""
    # As in the tests: two kernels of two threads each on two cores are several times slower than with one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    changed = [script for script in scripts(ROOT) if kept(script, ROOT) is None]
    with ThreadPoolExecutor(2) as pool:
        for script, seconds in zip(changed, pool.map(lambda script: run(script, ROOT), changed), strict=True):
            sys.stdout.write(f"{script.stem}: {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
