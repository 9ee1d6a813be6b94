"""Files that commands are given: models, detectors and weights."""

import pytest
from safetensors.torch import save_file

from robust_ext.demo.network import digits_network

MINE = """
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
ready = digits_network()
def make(trained=False):
    return digits_network(trained=trained)
class Unsure(Detector):
    def score_of(self, seen):
        first, second = seen.logits.topk(2).values.unbind(1)
        return second - first
class Bright(Detector):
    def score_of(self, seen):
        return seen.inputs.flatten(1).mean(1)
"""


@pytest.fixture
def files(tmp_path_factory):
    """A folder with ``mine.py`` and ``w.safetensors``, where 1 is added to the weights of the network for digits."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "mine.py").write_text(MINE)
    save_file({key: value + 1 for key, value in digits_network().state_dict().items()}, folder / "w.safetensors")
    return folder
