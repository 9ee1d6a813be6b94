"""Case studies with a detector: shared parts against scikit-learn and a loop."""

import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies import Trained
from robust_ext.casestudies.detected import DetectedNetwork, seen_by
from robust_ext.casestudies.recipes import PredictedLabels
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.base import Detector


class Brightness(Detector):
    """The mean, rounded, so that there are ties."""

    def score_of(self, observed):
        return observed.inputs.flatten(1).mean(1).mul(20).round()


def test_how_a_detector_sees_candidates():
    torch.manual_seed(0)
    clean, bright = torch.rand(60, 1, 4, 4), 0.2 + 0.8 * torch.rand(40, 1, 4, 4)
    detector = Brightness(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval())
    scores = [detector.score(points).tolist() for points in (clean, bright)]
    found = seen_by(detector, clean, bright, seed=0)
    assert abs(found["AUROC"] - roc_auc_score([0] * 60 + [1] * 40, scores[0] + scores[1])) < 1e-9
    # 95% of the clean scores are at most the limit.
    limit = sorted(scores[0])[int(0.95 * 59) + 1]
    assert abs(found["flagged"] - sum(score > limit for score in scores[1]) / 40) <= 0.05
    assert seen_by(detector, clean, bright[:0], seed=0) == {"AUROC": 0.0, "flagged": 0.0}


def test_predicted_labels_move_errors_away_from_what_is_predicted():
    """A misclassified input leaves its wrong class, of two classes for that of its label."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    x, attack = torch.rand(50, 1, 4, 4), ObjectivePGD(steps=5, rel_step_size=0.5)
    threat_model = ThreatModel(norm="linf", epsilon=0.5)
    case = Trained(module=module, inputs=x, labels=1 - module(x).argmax(1), threat_model=threat_model, seed=0)
    assert len(case.misclassified(attack)) == len(x)
    assert len(case.misclassified(PredictedLabels(attack=attack))) < len(x) / 2


def test_the_network_keeps_some_of_the_images():
    network = DetectedNetwork((1, 8, 8), 10)
    inputs, labels = torch.rand(400, 1, 8, 8), torch.arange(400) % 10
    network.keep(inputs, labels)
    assert torch.equal(network.kept_inputs[:400], inputs)
    assert torch.equal(network.kept_labels[400:], labels[:200])
    assert network(inputs[:3]).shape == (3, 10)
