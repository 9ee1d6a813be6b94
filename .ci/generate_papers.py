"""Copy the list of the four papers' items into the package, whose ``reproduce`` reads it; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def generate() -> dict[Path, str]:
    """The text of each file that is made."""
    text = (ROOT / "docs" / "theory" / "papers.md").read_text(encoding="utf-8")
    return {ROOT / "robust_ext" / "casestudies" / "papers.md": text}


if __name__ == "__main__":
    for path, text in generate().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what {__file__} writes")
