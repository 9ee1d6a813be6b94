"""MEAD end to end: against attacks and areas computed by hand, extended; and its suites of attacks."""

from collections import Counter
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from robust_ext import Arm, ThreatModel, mead
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run_folder import SavedRun
from robust_ext.evaluations.arms import plan_runs
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.mead.suites import as_arms, load_suite, parse_arm, suite_names
from robust_ext.evaluations.scored_runs import plan_clean
from tests.evaluations.small import essence
from tests.evaluations.subjects import Unsure, gradient, spread

LINF = ThreatModel(norm="linf", epsilon=0.2)
arm_of = partial(Arm, norm="linf", epsilon=0.2)
UNSURE = {"unsure": Unsure}


class Counting(Attack):
    """FGSM by hand, which counts its calls."""

    traits = AttackTraits(batching="full")

    def __init__(self, name="counting", *, scale=1.0):
        self.name, self.scale = name, scale
        # None of its settings.
        self.calls = Mock()

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.calls()
        return fgsm(target.module, inputs, labels, self.scale * threat_model.epsilon)


def fgsm(network, inputs, labels, epsilon):
    return (inputs + epsilon * gradient(network, inputs, labels).sign()).clamp(0, 1)


@pytest.fixture(scope="module")
def subject():
    digits = load_dataset("digits")
    inputs, labels = digits.take(range(40))
    return digits_network(), inputs, labels, digits.take(range(100, 200))[0]


def run(subject, detectors, arms, threat_model=LINF, **keywords):
    network, inputs, labels, held_out = subject
    keywords = {"detectors": detectors, "resamples": 0, "detector_data": held_out, **keywords}
    return mead(network, arms, inputs, labels, threat_model, **keywords)


def test_against_hand_written_attacks_and_scikit_learn(subject):
    """Two FGSMs by hand, worst case by hand, areas by scikit-learn."""
    network, inputs, labels, _ = subject
    attacks = {"a": Counting("strong"), "b": Counting("weak", scale=0.6)}
    result = run(subject, UNSURE, [arm_of(attack=one, objective=name) for name, one in attacks.items()])
    points = [fgsm(network, inputs, labels, scale * 0.2).detach() for scale in (1.0, 0.6)]
    natural, *scores = (Unsure(network).score(one).detach().double().numpy() for one in (inputs, *points))
    success = np.stack([(network(one).argmax(1) != labels).numpy() for one in points])
    rows = {row["objective"]: row for row in result.detectors["unsure"]["results"]}
    for objective, chosen in {None: [0, 1], "a": [0], "b": [1]}.items():
        entry, worst = rows[objective], np.where(success[chosen], np.array(scores)[chosen], np.inf).min(0)
        positives = worst[worst < np.inf]
        truth = np.repeat([0, 1], [len(natural), len(positives)])
        assert entry["auroc"] == pytest.approx(roc_auc_score(truth, np.r_[natural, positives]))
        found = (entry["positives"], entry["coverage"], entry["arms"])
        assert found == (len(positives), len(positives) / len(inputs), len(chosen))
        assert entry["successes_per_sample"] == success[chosen].sum() / len(inputs)
    assert [result.arms[f"{name} linf 0.2"]["successes"] for name in ("strong", "weak")] == success.sum(1).tolist()
    assert result.content["clean_accuracy"] == float((network(inputs).argmax(1) == labels).double().mean())
    assert result.auroc("unsure") == result.detectors["unsure"]["results"][0]["auroc"]


def test_detectors_and_arms_are_added_without_running_anything_again(subject, tmp_path):
    first, second, detectors = Counting("first"), Counting("second"), {"unsure": Unsure, "spread": spread}
    run(subject, UNSURE, [first], out=tmp_path / "one")
    both = run(subject, detectors, [second, first], out=tmp_path / "one")
    assert (first.calls.call_count, second.calls.call_count) == (1, 1)
    assert essence(both) == essence(run(subject, detectors, [second, first], out=tmp_path / "other"))


class Noisy(Unsure):
    """One whose scores are random."""

    random = True

    def score_of(self, observed):
        return super().score_of(observed) + torch.rand(len(observed.inputs))


def test_random_scores_are_the_same_whatever_detectors_there_are_and_whenever_they_come(subject, tmp_path):
    given = [Counting()]
    run(subject, UNSURE, given, batch_size=10, out=tmp_path)
    detectors = ({"noisy": Noisy}, None), ({**UNSURE, "noisy": Noisy}, None), ({**UNSURE, "noisy": Noisy}, tmp_path)
    found = [run(subject, some, given, batch_size=10, out=out).content["detectors"][-1] for some, out in detectors]
    assert len({one["results"][0]["auroc"] for one in found}) == 1


def test_minimum_norm_arms_are_judged_by_distance(subject, tmp_path):
    epsilons, deepfool = (0.2, 0.5, 1.0), "foolbox:L2DeepFoolAttack(steps=20, overshoot=0.02)"
    arms = [Arm(attack=deepfool, norm="l2", epsilon=epsilon, label="DF") for epsilon in (*epsilons, None)]
    result = run(subject, UNSURE, arms, out=tmp_path)
    (folder,) = (path for path in (tmp_path / "attacks").iterdir() if path.name.startswith("DF"))
    records = SavedRun(folder).records()
    distances = np.array([record["distance"] for record in records if record["outcome"] == "found"])
    counts = [result.arms[f"DF l2 {epsilon:g}"]["successes"] for epsilon in epsilons]
    assert counts == [int((distances <= epsilon).sum()) for epsilon in epsilons]
    assert result.arms["DF"]["successes"] == len(distances) > counts[0]
    assert result.arms["DF l2 0.2"]["outcomes"]["beyond_epsilon"] == len(distances) - counts[0]


def test_arms_that_know_the_detector(subject):
    """They are reported beside the others, scored by every detector, and refused where there are no gradients."""

    class Blind(Unsure):
        differentiable = False

    arms = [Counting(), arm_of(attack="robust_ext:SelectivePGD(steps=100)", label="Selective")]
    result = run(subject, {**UNSURE, "blind": Blind}, arms)
    unsure, blind = result.detectors["unsure"], result.detectors["blind"]
    aware, both = unsure["white_box"]
    assert [(row["scenario"], row["arms"]) for row in (aware, both)] == [("white-box", 1), ("all", 2)]
    # The attack lowers the score below that of FGSM, which knows nothing of it.
    assert aware["auroc"] < unsure["results"][0]["auroc"] - 0.15
    assert both["auroc"] <= unsure["results"][0]["auroc"]
    assert blind["white_box"] == []
    (refused,) = result.content["refused"]
    assert (refused["arms"], refused["detector"]) == (["Selective linf 0.2"], "blind")
    assert result.arms["Selective linf 0.2, knowing unsure"]["adaptive_to"] == "unsure"
    # Groups of blind arms do not count it.
    assert {row["arms"] for row in unsure["results"]} == {1}


def test_an_attack_that_never_succeeds_and_whose_budget_is_its_own(subject):
    network, inputs, _, held_out = subject
    given = (network, inputs, network(inputs).argmax(1), held_out), UNSURE, [arm_of(attack=Counting(scale=0.0))]
    result = run(*given, ThreatModel(norm="linf", epsilon=1))
    entry = result.detectors["unsure"]["results"][0]
    assert (entry["auroc"], entry["positives"], entry["attribution"], entry["curve"]) == (None, 0, None, None)
    # An epsilon that no arm has is no fault.
    assert "threat_scale" not in {one["code"] for one in result.content["findings"]}


def plan(arms, values, detectors=()):
    x, module = torch.zeros(1, values), torch.nn.Identity()
    given = EvaluationInputs(module=module, inputs=x, labels=x, logits=x, ids=[0], threat_model=LINF)
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
        assert objectives - {None} in ({"ace", "kl", "gini", "fisher-rao"}, set())
    assert [arm.norm for arm in arms if arm.group == "Spatial"] == [None]
    assert {arm.norm for arm in arms if arm.group in ("DeepFool", "CW2", "HopSkipJump")} == {"l2"}


def test_every_suite_can_be_run_as_it_is_in_any_bounds():
    for name in suite_names():
        for one in plan(load_suite(name), 784, ["one"]):
            assert one.attack.refusal(threat_model=one.threat_model, detector=one.adaptive_to is not None) is None
    narrow, wide = load_suite("quick"), load_suite("quick", bounds=(-1.0, 1.0))
    assert [arm.epsilon * 2 for arm in narrow] == [arm.epsilon for arm in wide]


FILE = """
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


def test_arms_of_files_and_of_the_command_line(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    arms = load_suite(str(tmp_path / "mine.toml"))
    assert [arm.name for arm in arms] == ["FB linf 0.1", "FB linf 0.25", "KL l2 1"]
    assert [(arm.objective, arm.algorithm) for arm in arms] == [("ce", "pgd"), ("ce", "pgd"), ("kl", None)]
    assert arms[2].resolved.objective == "kl"
    one, two = parse_arm("linf:8/255,0.5=foolbox:LinfPGD(steps=3)")
    assert (one.norm, one.epsilon, two.epsilon) == ("linf", 8 / 255, 0.5)
    assert parse_arm("l2=foolbox:L2DeepFoolAttack()")[0].epsilon is None
    assert parse_arm("none=robust_ext:SpatialTransformation()")[0].norm is None
    for budget in ("", "linf:x=", "linf:1/0=", "lp:1="):
        with pytest.raises(InvalidArgumentError):
            parse_arm(f"{budget}foolbox:LinfPGD()")


@pytest.mark.parametrize("attack", ["os:system(command='touch run')", "mine.py:attack", "subprocess:run"])
def test_a_file_runs_code_only_where_that_is_allowed(tmp_path, monkeypatch, attack):
    monkeypatch.chdir(tmp_path)
    code = "import pathlib\npathlib.Path('run').touch()\ndef attack(model, x, y): return x"
    (tmp_path / "mine.py").write_text(code)
    file = tmp_path / "suite.toml"
    file.write_text(f'[[arms]]\nattack = "{attack}"\nnorm = "linf"\nepsilons = [0.1]')
    for load in (load_suite, lambda name: as_arms(name, LINF), lambda name: as_arms([name], LINF)):
        with pytest.raises(InvalidArgumentError, match="--allow-code"):
            load(str(file))
    assert not (tmp_path / "run").exists()
    if attack.startswith("mine"):
        assert as_arms(str(file), LINF, allow_code=True)[0][0].name == "mine.py:attack linf 0.1"


def test_what_is_run_once_and_what_for_each_detector():
    deepfool = "foolbox:L2DeepFoolAttack(steps=5)"
    arms = [Arm(attack=deepfool, norm="l2", epsilon=epsilon, label="DF") for epsilon in (0.5, 1.0, 2.0)]
    runs = plan([*arms, *(Arm(attack="robust_ext:ObjectivePGD()", norm="l2", epsilon=e) for e in (0.5, 1.0))], 100)
    # A minimum-norm attack once, with a ball that holds every image in bounds.
    assert [(len(one.arms), one.threat_model.epsilon) for one in runs] == [(3, 10), (1, 0.5), (1, 1.0)]
    runs = plan(load_suite("white-box"), 64, ["a", "b"])
    norms = Counter((one.adaptive_to.name, one.threat_model.norm) for one in runs)
    assert norms == {(name, norm): count for name in "ab" for norm, count in (("linf", 12), ("l2", 12), ("l1", 9))}
    assert len({one.key for one in runs}) == 66
