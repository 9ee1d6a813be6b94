"""Writing files and checking their refusal, for the tests of all formats."""

from pathlib import Path

import pytest

from robust_ext.core.errors import DataError
from robust_ext.datasets import load_dataset

REAL = Path(__file__).parents[3] / "shared" / "data"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def check_refused(parts, spec, **given):
    """Loading raises a ``DataError`` whose text holds all parts."""
    with pytest.raises(DataError) as caught:
        load_dataset(str(spec), **given)
    for part in parts:
        assert str(part) in str(caught.value)
