"""MEAD results that several files read."""

import pytest

from tests.reports.mead_results import large_result


@pytest.fixture(scope="session")
def large():
    return large_result(3)
