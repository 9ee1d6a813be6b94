"""Detectors whose scores do not follow from each row alone are refused wherever they enter."""

import pytest
import torch

from robust_ext.core.errors import InconsistentModelError
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.detectors import detector_beside
from tests.evaluations.small import call


def noise(x):
    return (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)


class Declared(torch.nn.Module):
    random = True

    def forward(self, x):
        return noise(x) + 0.01 * torch.rand(len(x))


OF_THE_BATCH = {
    "less the mean": lambda x: noise(x) - noise(x).mean(),
    "a rank": lambda x: noise(x).argsort().argsort().float(),
    "a softmax over rows": lambda x: noise(x).softmax(0),
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


@pytest.mark.parametrize("kind", ["binarization", "mead"])
def test_evaluations_refuse_them(kind):
    x, mine = torch.rand(30, 1, 8, 8), OF_THE_BATCH["less the mean"]
    given = {"detector_data": x[4:], "detector" if kind == "binarization" else "detectors": mine}
    with pytest.raises(InconsistentModelError, match="detector "):
        call(kind, digits_network(), "robust_ext:APGD", x[:4], digits_network()(x[:4]).argmax(1), **given)
