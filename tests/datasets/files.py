"""Writing files and checking their refusal, for the tests of all formats."""

import pytest

from robust_ext.core.errors import DataError
from robust_ext.datasets import load_dataset


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def check_refused(parts, spec, **given):
    with pytest.raises(DataError) as caught:
        load_dataset(str(spec), **given)
    for part in parts:
        assert str(part) in str(caught.value)
