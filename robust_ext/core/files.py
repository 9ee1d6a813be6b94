"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file, whose folder exists, in one step, also when the machine stops in the middle; text becomes UTF-8.

    The draft lies beside it, because a rename needs one disk.
    """
    # The process id keeps two processes that write the same file apart.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
