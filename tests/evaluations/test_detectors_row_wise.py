"""Detectors whose scores do not follow from each row alone are refused wherever they enter."""

import pytest
import torch

import robust_ext
from robust_ext.core.errors import InconsistentModelError
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.detectors import detector_beside


def noise(x):
    return (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)


class Declared(torch.nn.Module):
    random = True

    def forward(self, x):
        return noise(x) + 0.01 * torch.rand(len(x))


OF_THE_BATCH = {
    "less the mean": lambda x: noise(x) - noise(x).mean(),
    "less the mean, far from zero": lambda x: 100 + noise(x) - noise(x).mean(),
    "a rank": lambda x: noise(x).argsort().argsort().float(),
    "a share of the largest": lambda x: noise(x) / noise(x).max(),
    "a softmax over rows": lambda x: noise(x).softmax(0),
    "standardised": lambda x: (noise(x) - noise(x).mean()) / (noise(x).var(correction=0) + 1e-6).sqrt(),
    "a running sum": lambda x: noise(x).cumsum(0),
    "a share of the number": lambda x: noise(x) / len(x),
}
SOUND = {
    "of the row": noise,
    "constant": lambda x: torch.zeros(len(x)),
    "far from zero": lambda x: 1e4 + noise(x),
    "tiny": lambda x: 1e-12 * noise(x),
    "declared random": Declared().eval(),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_scores_of_the_batch_are_refused(name, rows):
    x = torch.rand(rows, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InconsistentModelError, match="rows next to it") as raised:
        detector_beside(OF_THE_BATCH[name], digits_network(), x)
    assert raised.value.kind == "batch"


def test_undeclared_chance_is_refused():
    x = torch.rand(4, 1, 8, 8)
    with pytest.raises(InconsistentModelError, match="random = True"):
        detector_beside(lambda x: noise(x) + torch.rand(len(x)), digits_network(), x)


@pytest.mark.parametrize("name", SOUND)
def test_sound_scores_are_accepted(name):
    assert detector_beside(SOUND[name], digits_network(), torch.rand(4, 1, 8, 8)) is not None


@pytest.mark.parametrize("evaluation", ["binarization", "mead"])
def test_evaluations_refuse_them(evaluation):
    x, linf = torch.rand(30, 1, 8, 8), robust_ext.ThreatModel(norm="linf", epsilon=0.1)
    given = {"detector_data": x[4:]}

    def mine(x):
        return noise(x) - noise(x).mean()

    def run():
        if evaluation == "binarization":
            return robust_ext.binarization_test(
                digits_network(), "robust_ext:Square", x[:4], linf, detector=mine, **given
            )
        y = digits_network()(x[:4]).argmax(1)
        return robust_ext.mead(digits_network(), "robust_ext:APGD", x[:4], y, linf, detectors=mine, **given)

    with pytest.raises(InconsistentModelError, match="detector mine"):
        run()
