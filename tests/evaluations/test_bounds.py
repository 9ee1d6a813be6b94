"""Inputs in other units: the same network behind an affine map of its inputs has the same results."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

import robust_ext
from robust_ext import ThreatModel
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.datasets import load_dataset
from robust_ext.defenses import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.detectors import FeatureSqueezingDetector, MagNetDetector, NSSDetector, OddsDetector
from robust_ext.evaluations.mead.suites import load_suite, suite_names
from robust_ext.models.defended import Defended
from robust_ext.models.wrapping import Rescaled
from tests.evaluations.subjects import SMALL

# A change of units by a power of two has no rounding: results in these bounds are the same to the last bit.
UNIT, EXACT = (0.0, 1.0), (0.0, 256.0)
NETWORK = digits_network()
INPUTS, LABELS = load_dataset("digits").take(range(12))
HELD_OUT = load_dataset("digits").take(range(100, 180))[0]
in_other_bounds = pytest.mark.parametrize("bounds", [EXACT, (-2.0, 0.5)], ids=str)


class Units:
    """The digits network, its inputs, a threat model and detectors in some bounds."""

    def __init__(self, bounds):
        self.bounds, self.width = bounds, bounds[1] - bounds[0]
        self.network = NETWORK if bounds == UNIT else Rescaled(NETWORK, UNIT, bounds)
        self.inputs, self.held_out = self.stretched(INPUTS), self.stretched(HELD_OUT)
        self.ball = ThreatModel(norm="linf", epsilon=0.1 * self.width, bounds=bounds)
        self.given = self.network, self.inputs, LABELS, self.ball

    def stretched(self, x):
        return (x * self.width + self.bounds[0]).clamp(*self.bounds)

    def odds(self):
        torch.manual_seed(0)
        noises = [(kind, 0.05) for kind in ("normal", "sign", "uniform")]
        detector = OddsDetector(self.network, noises=noises, bounds=self.bounds, draws=4)
        detector.fit(self.held_out)
        return detector

    def nss(self):
        noise = torch.rand(HELD_OUT.shape, generator=torch.Generator().manual_seed(0)).round()
        detector = NSSDetector(self.network, bounds=self.bounds)
        detector.fit(self.held_out, self.stretched((HELD_OUT + 0.2 * noise).clamp(0, 1)))
        return detector


def binarization(units):
    attack = "robust_ext:APGD(steps=10)"
    result = robust_ext.binarization_test(units.network, attack, units.inputs, units.ball, depths=(1, 2), **SMALL)
    return result.verdict, {"score": result.score}


def robust_accuracy(units):
    attacks = ("APGD(steps=10)", "ObjectivePGD(steps=10)", "BoundarySearch(budget=300)", "RayS(queries=60)")
    attacks = [f"robust_ext:{one}" for one in (*attacks, "Square(queries=40)", "CarliniWagnerLinf(steps=9)")]
    result = robust_ext.robust_accuracy(units.network, attacks, *units.given[1:])
    return None, {(row["attack"], key): row[key] for row in result.rows() for key in row if "accuracy" in key}


def defense(units):
    made = HedgeDefense(units.network, steps=2, bounds=units.bounds, seed=0)
    few = {"classifier": units.network, "steps": 4, "transfer_steps": 50, "queries": 40}
    result = robust_ext.evaluate_defense(made, "recommended", *units.given[1:], **few)
    return None, {key: value for key, value in result.rows()[-1].items() if "accuracy" in key}


def diagnosis(units):
    result = robust_ext.diagnose(units.network, "robust_ext:ObjectivePGD(steps=1)", *units.given[1:])
    return {finding.code for finding in result.findings}, {}


def evaluation(units):
    result = robust_ext.evaluate(*units.given, budget="quick", planted=8)
    return (result.verdict, result.content["certificate"]["found"]), {"robust": result.robust_accuracy}


def mead(units):
    torch.manual_seed(0)
    magnet = MagNetDetector(units.network, bounds=units.bounds, epochs=1)
    magnet.fit(units.held_out)
    squeezing = FeatureSqueezingDetector(units.network, squeezers="mnist", bounds=units.bounds)
    detectors = {"squeezing": squeezing, "magnet": magnet, "odds": units.odds(), "nss": units.nss()}
    given, rows = {"detectors": detectors, "detector_data": units.held_out, "resamples": 0}, []
    for attacks in ("quick", ["robust_ext:OrthogonalPGD(steps=20)", "robust_ext:LogitMatching(steps=5, samples=1)"]):
        rows += robust_ext.mead(units.network, attacks, *units.given[1:], **given).rows()
    return None, {(number, key): row[key] for number, row in enumerate(rows) for key in row if "auroc" in key}


@lru_cache
def found_in(bounds, kind):
    return kind(Units(bounds))


@pytest.mark.exhaustive
@in_other_bounds
@pytest.mark.parametrize("kind", [binarization, robust_accuracy, evaluation, defense, diagnosis, mead])
def test_results_do_not_depend_on_the_units_of_the_inputs(kind, bounds):
    (same, close), (of_unit, near) = found_in(bounds, kind), found_in(UNIT, kind)
    assert same == of_unit
    assert close == (near if bounds == EXACT else pytest.approx(near, abs=0.05))


@lru_cache
def lengths_in(bounds, suite):
    """How far one arm of each attack goes, by the arm."""
    units, found = Units(bounds), {}
    for arm in {arm.short: arm for arm in load_suite(suite, bounds=bounds)}.values():
        given = {"module": units.network, "bounds": bounds, "references": units.held_out[None, :4]}
        target = Target(**given, classes=10, input_shape=(1, 8, 8), device=torch.device("cpu"))
        if arm.resolved.traits.detector:
            detector = units.odds()
            detector.calibrate(units.held_out)
            target = replace(target, defended=Defended(units.network, detector))
        model = arm.threat_model(ThreatModel(norm="linf", epsilon=1, bounds=bounds), values=64)
        given = {"threat_model": model, "generator": stream(0)}
        points = run_attack(arm.resolved, target, units.inputs[:1], LABELS[:1], **given)
        found[arm.short] = (points - units.inputs[:1]).double().flatten(1).norm(dim=1) / units.width
    return found


# A width of a power of two: in (-2, 0.5) one arm in l1 took another path by rounding on one kind of machine, 6% longer.
@pytest.mark.parametrize("bounds", [EXACT, (-1.0, 3.0)], ids=str)
@pytest.mark.parametrize(
    "suite", [name if name == "quick" else pytest.param(name, marks=pytest.mark.exhaustive) for name in suite_names()]
)
def test_attacks_of_a_suite_go_equally_far(suite, bounds):
    near = {"rtol": 0, "atol": 0} if bounds == EXACT else {"rtol": 0.05, "atol": 1e-3}
    changed, unit = lengths_in(bounds, suite), lengths_in(UNIT, suite)
    assert changed.keys() == unit.keys()
    for name, length in unit.items():
        torch.testing.assert_close(changed[name], length, **near, msg=f"{name}: {changed[name]}, {length}")
