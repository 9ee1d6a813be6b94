import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small networks are fastest on one thread, and several test processes share the cores."""
    torch.set_num_threads(1)
