"""Faults that no threshold was chosen on: what they do, and what the diagnosis states first."""

import pytest

import robust_ext
from robust_ext.core.errors import AttackError, ModelError
from robust_ext.datasets import load_dataset
from tests.evaluations.diagnosis.held_out import FAULTS

# Written down as a path that is too short, before there was a code for steps that are not kept; see docs/diagnosis.md.
RENAMED = {"every step from the clean input": "vanishing_steps"}
pytestmark = pytest.mark.exhaustive
FAULT = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


@pytest.fixture(scope="module")
def digits():
    data = load_dataset("digits")
    return data.take(data.choose(16, seed=0))


def solved(model, attack, inputs, threat_model):
    """The share of planted examples that are found; None where the evaluation refuses to run."""
    try:
        result = robust_ext.binarization_test(model, attack, inputs, threat_model, inner_points=99, judge_seed=0)
    except (ModelError, AttackError):
        return None
    return result.content["attacks"][0]["score"]


@FAULT
def test_it_hurts_and_its_twin_is_healthy(fault, digits):
    inputs, _ = digits
    faulty = solved(fault.model(), fault.attack, inputs, fault.threat_model)
    assert faulty is None or faulty < 0.5
    assert solved(fault.healthy_model(), fault.healthy_attack, inputs, fault.threat_model) >= 0.95


@FAULT
def test_it_is_named_first(fault, digits):
    found = robust_ext.diagnose(fault.model(), fault.attack, *digits, fault.threat_model).findings
    assert (found[0].code, found[0].layer) == (RENAMED.get(fault.name, fault.code), fault.layer)


@FAULT
def test_nothing_is_found_in_its_twin(fault, digits):
    assert robust_ext.diagnose(fault.healthy_model(), fault.healthy_attack, *digits, fault.threat_model).likely is None
