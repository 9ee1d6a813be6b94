"""Suites: what comes with the project against the paper's collection, files of one's own, and bad ones."""

from collections import Counter

import pytest
import torch

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.evaluations.arms import Arm, plan_runs
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.mead.suites import as_arms, load_suite, parse_arm, suite_names
from robust_ext.evaluations.scored_runs import plan_clean

OBJECTIVES = {"ace", "kl", "gini", "fisher-rao"}


def plan(arms, values, detectors=()):
    x = torch.zeros(1, values)
    model = ThreatModel(norm="linf", epsilon=0.1)
    module = torch.nn.Identity()
    given = EvaluationInputs(module=module, inputs=x, labels=x, logits=x, ids=[0], threat_model=model)
    named = [NamedDetector(name=name, detector=module, digest="") for name in detectors]
    return plan_runs(arms, plan_clean(given, batch_size=1, seed=0, detectors=named))


@pytest.mark.parametrize(("name", "square"), [("paper-mnist", "linf 0.3125"), ("paper-cifar10", "linf 0.125")])
def test_the_papers_collection(name, square):
    """Group sizes of the paper's tables 4 and 10: 4 in l1 and l2, 12 in linf, and one or two more where they join."""
    arms = load_suite(name)
    sizes = Counter(arm.group for arm in arms)
    expected = {f"l1 {epsilon}": 4 for epsilon in (5, 10, 15, 20, 25, 30, 40)}
    expected |= {f"l2 {epsilon:g}": 4 for epsilon in (0.125, 0.25, 0.3125, 0.5, 1, 1.5, 2)}
    expected |= {f"linf {epsilon:g}": 12 for epsilon in (0.03125, 0.0625, 0.125, 0.25, 0.3125, 0.5)}
    expected |= {"DeepFool": 1, "CW2": 1, "HopSkipJump": 1, "Spatial": 1}
    expected["linf 0.3125"] += 1
    expected[square] += 1
    assert sizes == expected
    for group in sizes:
        objectives = {arm.objective for arm in arms if arm.group == group}
        assert objectives - {None} in (OBJECTIVES, set())
    assert [arm.norm for arm in arms if arm.group == "Spatial"] == [None]
    assert {arm.norm for arm in arms if arm.group in ("DeepFool", "CW2", "HopSkipJump")} == {"l2"}


def test_the_papers_steps():
    """PGD: 100 steps of .01, .1 and 4; BIM: int(320 eps) steps of .01; FGSM: one of eps."""
    arms = {arm.name: arm for arm in load_suite("paper-mnist")}
    for name, steps, size in (
        ("PGD-KL l1 15", 100, 4.0),
        ("PGD-Gini l2 0.3125", 100, 0.1),
        ("PGD-FR linf 0.125", 100, 0.01),
        ("BIM-ACE linf 0.3125", 100, 0.01),
        ("BIM-ACE linf 0.03125", 10, 0.01),
        ("FGSM-Gini linf 0.5", 1, 0.5),
    ):
        attack, model = arms[name].resolved, ThreatModel(norm=arms[name].norm, epsilon=arms[name].epsilon)
        assert isinstance(attack, ObjectivePGD)
        assert (attack.steps_for(model), attack.step_size_for(model)) == (steps, size)


def test_every_suite_can_be_run_as_it_is():
    for name in suite_names():
        for run in plan(load_suite(name), 784, ["one"]):
            assert run.attack.refusal(threat_model=run.threat_model, detector=run.adaptive_to is not None) is None


def test_budgets_follow_the_bounds():
    narrow, wide = load_suite("quick"), load_suite("quick", bounds=(-1.0, 1.0))
    assert [arm.epsilon * 2 for arm in narrow] == [arm.epsilon for arm in wide]


def test_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        description = "mine"
        [[arms]]
        attack = "foolbox:LinfPGD(steps=7)"
        norm = "linf"
        epsilons = [0.1, 0.25]
        label = "FB"
        objective = "ce"
        algorithm = "pgd"
        [[arms]]
        attack = "robust_ext:ObjectivePGD()"
        norm = "l2"
        epsilons = [1]
        objectives = ["kl"]
        """
    )
    arms = load_suite(str(file))
    assert [arm.name for arm in arms] == ["FB linf 0.1", "FB linf 0.25", "KL l2 1"]
    assert [(arm.objective, arm.algorithm) for arm in arms] == [("ce", "pgd"), ("ce", "pgd"), ("kl", None)]
    assert arms[2].resolved.objective == "kl"


@pytest.mark.parametrize("attack", ["os:system(command='touch run')", "mine.py:attack", "subprocess:run"])
def test_a_file_runs_code_only_where_that_is_allowed(tmp_path, monkeypatch, attack):
    monkeypatch.chdir(tmp_path)
    code = "import pathlib\npathlib.Path('run').touch()\ndef attack(model, x, y): return x"
    (tmp_path / "mine.py").write_text(code)
    file = tmp_path / "suite.toml"
    file.write_text(f'[[arms]]\nattack = "{attack}"\nnorm = "linf"\nepsilons = [0.1]')
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    for load in (load_suite, lambda name: as_arms(name, threat_model), lambda name: as_arms([name], threat_model)):
        with pytest.raises(InvalidArgumentError, match="--allow-code"):
            load(str(file))
    assert not (tmp_path / "run").exists()
    if attack.startswith("mine"):
        assert as_arms(str(file), threat_model, allow_code=True)[0][0].name == "mine.py:attack linf 0.1"


def test_arms_from_the_command_line():
    one, two = parse_arm("linf:8/255,0.5=foolbox:LinfPGD(steps=3)")
    assert (one.norm, one.epsilon, two.epsilon) == ("linf", 8 / 255, 0.5)
    assert parse_arm("l2=foolbox:L2DeepFoolAttack()")[0].epsilon is None
    assert parse_arm("none=robust_ext:SpatialTransformation()")[0].norm is None
    for budget in ("", "linf:x=", "linf:1/0=", "lp:1="):
        with pytest.raises(InvalidArgumentError):
            parse_arm(f"{budget}foolbox:LinfPGD()")


def test_minimum_norm_attacks_are_run_once():
    deepfool = "foolbox:L2DeepFoolAttack(steps=5)"
    arms = [Arm(attack=deepfool, norm="l2", epsilon=epsilon, label="DF") for epsilon in (0.5, 1.0, 2.0)]
    arms += [Arm(attack="robust_ext:ObjectivePGD()", norm="l2", epsilon=epsilon) for epsilon in (0.5, 1.0)]
    runs = plan(arms, 100)
    assert [len(run.arms) for run in runs] == [3, 1, 1]
    # Far enough for every image in bounds.
    assert runs[0].threat_model.epsilon == 10
    assert [run.threat_model.epsilon for run in runs[1:]] == [0.5, 1.0]


def test_arms_that_know_the_detector_are_run_for_each():
    runs = plan(load_suite("white-box"), 64, ["a", "b"])
    norms = Counter((run.adaptive_to.name, run.threat_model.norm) for run in runs)
    assert norms == {(name, norm): count for name in "ab" for norm, count in (("linf", 12), ("l2", 12), ("l1", 9))}
    assert len({run.key for run in runs}) == 66
