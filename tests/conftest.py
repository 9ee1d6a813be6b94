import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small networks are fastest on one thread, and several test processes share the cores."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Slow tests first, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
