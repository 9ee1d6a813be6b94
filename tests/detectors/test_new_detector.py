"""A detector of one's own: one file with one class, and one line in the catalogue."""

import pytest
import torch

from robust_ext import fit_detector
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.detectors.catalogue import DETECTORS
from tests.detectors.cases import CLEAN, data, network

ONE_FILE = '''
import torch
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.detectors import Detector


@module_class
class Brightness(Detector):
    """How far the mean of an input is from that of training inputs."""

    presets = {"mnist": {"power": 1}, "cifar10": {"power": 2}}

    power: float = setting(default=1.0, help="Of the distance.", above=0)
    middle: torch.Tensor = buffer("Mean of training inputs, ``(1,)``.")

    def fit(self, inputs):
        self.middle = inputs.mean()[None]

    def fit_to(self, data, settings, *, seed):
        self.fit(data.clean, **settings)

    def score_of(self, observed):
        self.check_fitted(self.middle.numel(), on="inputs")
        return (observed.inputs.flatten(1).mean(1) - self.middle).abs() ** self.power
'''


def test_a_new_detector_is_one_file_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "brightness.py").write_text(ONE_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    from brightness import Brightness

    monkeypatch.setitem(DETECTORS, "brightness", Brightness)
    classifier = network()
    detector = fit_detector("brightness", classifier, CLEAN, classifier(CLEAN).argmax(1))
    assert detector.settings == {"power": 1}
    assert detector.calibrate(data(40, 1)).achieved == 0.05
    assert all(text in Brightness.__doc__ for text in ("power: Of the distance.", "middle: Mean of training inputs"))
    detector.save(tmp_path / "brightness.safetensors")
    again = Brightness.load(tmp_path / "brightness.safetensors", classifier)
    assert torch.equal(again.decide(data(9)), detector.decide(data(9)))
    with pytest.raises(InvalidArgumentError, match="power: got 0"):
        fit_detector("brightness", classifier, CLEAN, classifier(CLEAN).argmax(1), power=0)
    with pytest.raises(InvalidArgumentError, match="settings: got bandwidth, expected settings of brightness: power"):
        fit_detector("brightness", classifier, CLEAN, classifier(CLEAN).argmax(1), bandwidth=1)
