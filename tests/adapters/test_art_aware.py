from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import frozen
from robust_ext.models.defended import Defended
from robust_ext.registry import as_attack
from robust_ext.testing.defenses import FarHidden, Problem, small_defense
from robust_ext.testing.networks import margins, small_batch

attacks = pytest.importorskip("robust_ext.adapters.art.attacks", reason="ART is not installed")
invariants = pytest.importorskip("robust_ext.testing.art_invariants", reason="ART is not installed")
estimators = pytest.importorskip("robust_ext.estimators", reason="ART is not installed")
art = invariants.art
Base: Any = invariants.ArtAttackInvariants
Bounds = tuple[float, float]

RENAMED = {"step_size": "rel_step_size"}
QUICK: dict[str, dict[str, Any]] = {
    "OrthogonalPGD": {"steps": 12, "step_size": 0.2},
    "SelectivePGD": {"steps": 12, "step_size": 0.2},
    "JointLoss": {"steps": 8, "restarts": 2},
    "FeatureMatching": {"features": "2", "steps": 12, "step_size": 0.1},
    "LogitMatching": {"steps": 12, "step_size": 0.1, "samples": 2, "level": 0.02, "check_every": 2},
}
NORMS = {"linf": np.inf, "l2": 2, "l1": 1}
CASES = [(norm, name) for name in QUICK for norm in NORMS if (norm, name) != ("l1", "OrthogonalPGD")]
EachCase = pytest.mark.parametrize(("norm", "name"), CASES)
EachName = pytest.mark.parametrize("name", list(QUICK))
MATCHING = ("FeatureMatching", "LogitMatching")
EPSILON = {"linf": 0.3, "l2": 0.8, "l1": 2.4}
WRONG: Any = (*Base.wrong_settings, {"seed": -1}, {"steps": 0}, {"start": "middle"})


class Aware(Base):
    """The invariants on estimators whose detector is watched, with logits of the classifier alone."""

    epsilon = 0.25
    wrong_settings = WRONG
    repeatable: ClassVar[dict[str, Any]] = {"start": "input", "restarts": 1}

    def make_network(self, bounds: Bounds, classes: int) -> nn.Module:
        network = super().make_network(bounds, classes)
        points = small_batch(64, self.shape, bounds=bounds)
        detector = FarHidden(network)
        with torch.no_grad():
            detector.middle = network[:3](points).mean(0)
        detector.calibrate(points, false_positive_rate=0.05)
        return Defended(network, detector)

    def test_preprocessing_of_the_estimator_is_attacked_through(self) -> None:
        """It is refused: the detector could not see what it does."""
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_preprocessing_of_the_estimator_is_attacked_through()


class TestLinfOrthogonalPGD(Aware):
    wrong_settings = (*WRONG, {"norm": 1}, {"norm": 2, "step": "sign"})

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.OrthogonalPGD(estimator, **{**QUICK["OrthogonalPGD"], **settings})


class TestL2SelectivePGD(Aware):
    norm = 2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.SelectivePGD(estimator, **{"norm": 2, **QUICK["SelectivePGD"], **settings})


class TestL1JointLoss(Aware):
    norm = 1

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return attacks.JointLoss(estimator, **{"norm": 1, **QUICK["JointLoss"], **settings})


def guided(kind: Any) -> Any:
    """An attack that finds its references itself, as the invariants give none."""

    class Guided(kind):  # type: ignore[misc]
        def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
            network = self.estimator.model.classifier
            low, high = (float(end) for end in self.estimator.clip_values)
            pool = small_batch(64, x.shape[1:], bounds=(low, high))
            with frozen(network), torch.no_grad():
                logits = network.eval()(pool)
                labels = network(torch.from_numpy(x)).argmax(1) if y is None else torch.from_numpy(y)
            labels = labels.argmax(1) if labels.dim() == 2 else labels
            sign = 1 if self.targeted else -1
            found = [pool[(sign * margins(logits, label.expand(64))).topk(3).indices] for label in labels.long()]
            return super().generate(x, y, references=torch.stack(found).numpy(), **kwargs)

    Guided.__init__ = kind.__init__
    return Guided


class TestL2FeatureMatching(Aware):
    norm = 2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        made = guided(attacks.FeatureMatching)
        return made(estimator, **{"norm": 2, **QUICK["FeatureMatching"], **settings})


class TestLinfLogitMatching(Aware):
    repeatable: ClassVar[dict[str, Any]] = {"start": "input", "restarts": 1, "level": 0}

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        return guided(attacks.LogitMatching)(estimator, **{**QUICK["LogitMatching"], **settings})


def estimator_of(problem: Problem, *, view: str = "reject") -> Any:
    defended = problem.defended
    shown = Defended(defended.classifier, defended.detector, inverted=defended.inverted, exposure=view)
    shape, bounds = tuple(problem.inputs.shape[1:]), problem.threat_model.bounds
    return estimators.DefendedPyTorchClassifier(shown, input_shape=shape, nb_classes=4, clip_values=bounds)


def make(name: str, problem: Problem, *, view: str = "reject", **settings: Any) -> Any:
    return getattr(attacks, name)(
        estimator_of(problem, view=view),
        **{
            "norm": NORMS[problem.threat_model.norm],
            "eps": problem.threat_model.epsilon,
            "verbose": False,
            **QUICK[name],
            **settings,
        },
    )


def keywords(name: str, problem: Problem) -> dict[str, Any]:
    assert problem.target.references is not None
    return {"references": problem.target.references.numpy()} if name in MATCHING else {}


@EachCase
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(norm: str, name: str, bounds: Bounds, targeted: bool) -> None:
    problem = small_defense(6, norm=norm, epsilon=EPSILON[norm], bounds=bounds)
    labels = (problem.labels + 1) % 4 if targeted else problem.labels
    attack = make(name, problem, seed=5, targeted=targeted)
    points = attack.generate(problem.inputs.numpy(), labels.numpy(), **keywords(name, problem))
    expected = attack.native().search(
        problem.target,
        problem.inputs,
        labels,
        threat_model=problem.threat_model,
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    )
    assert np.array_equal(points, expected.numpy())
    assert not np.array_equal(points, problem.inputs.numpy())


@EachName
@pytest.mark.parametrize("inverted", [False, True])
def test_the_classifier_is_fooled_and_says_so(name: str, inverted: bool) -> None:
    problem = small_defense(12, inverted=inverted)
    attack = make(name, problem, seed=0)
    points = attack.generate(problem.inputs.numpy(), problem.labels.numpy(), **keywords(name, problem))
    outcomes = attack.estimator.outcomes(points, problem.labels.numpy())
    fooled = [outcome == "fooled" for outcome in outcomes]
    assert fooled == problem.successes(torch.from_numpy(points)).tolist()
    assert any(fooled)


@EachName
def test_both_views_and_all_forms_of_labels_are_attacked_alike(name: str) -> None:
    problem = small_defense(6)
    x, y = problem.inputs.numpy(), problem.labels.numpy()
    ways = keywords(name, problem)
    expected = make(name, problem, seed=1).generate(x, y, **ways)
    for labels in (np.eye(4)[y], np.eye(5)[y], y[:, None], None):
        assert np.array_equal(make(name, problem, seed=1).generate(x, labels, **ways), expected)
    plain = make(name, problem, view="classifier", seed=1)
    for labels in (y, np.eye(4)[y], None):
        assert np.array_equal(plain.generate(x, labels, **ways), expected)


@EachName
def test_settings_are_those_of_the_core_attack(name: str) -> None:
    kind = getattr(attacks, name)
    core = dict(signature(kind.core).parameters)
    core["step_size"] = core.pop("rel_step_size")
    own = signature(kind).parameters
    assert kind.core.__name__ == name
    assert {key: own[key].default for key in core} == {key: value.default for key, value in core.items()}
    shared = {"estimator", "norm", "eps", "targeted", "batch_size", "seed", "summary_writer", "verbose"}
    assert set(own) - set(core) == shared
    changed = make(name, small_defense(1))
    assert {key: getattr(changed.native(), RENAMED.get(key, key)) for key in QUICK[name]} == QUICK[name]
    changed.set_params(steps=3)
    assert changed.native().steps == 3


@pytest.mark.parametrize(
    ("name", "settings"), [("OrthogonalPGD", {"norm": 1}), ("JointLoss", {"norm": 2, "step": "sign"})]
)
def test_norms_that_the_settings_do_not_go_with_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"norm: got {settings['norm']}, expected one for linf"):
        make(name, small_defense(1), **settings)
    attack = make(name, small_defense(1))
    with pytest.raises(InvalidArgumentError, match="norm: got"):
        attack.set_params(**settings)


@EachName
def test_classifiers_without_a_detector_are_refused(name: str) -> None:
    plain = invariants.PyTorchClassifier(
        small_defense(1).defended.classifier, loss=nn.CrossEntropyLoss(), input_shape=(1, 3, 4), nb_classes=4
    )
    with pytest.raises(InvalidArgumentError, match=r"without a detector, expected .*DefendedPyTorchClassifier"):
        getattr(attacks, name)(plain)


def test_preprocessing_around_the_detector_is_refused() -> None:
    problem = small_defense(4)

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = problem.defended

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x + 0.1)
            return out

    estimator = invariants.PyTorchClassifier(
        Shifted(), nn.CrossEntropyLoss(), (1, 3, 4), 4, clip_values=(0, 1), device_type="cpu"
    )
    attack = attacks.SelectivePGD(estimator, eps=0.1, steps=2, verbose=False)
    with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits around its detector"):
        attack.generate(problem.inputs.numpy(), problem.labels.numpy())


def test_references_go_with_their_rows_and_may_be_shared() -> None:
    problem = small_defense(6)
    assert problem.target.references is not None
    x, y, groups = problem.inputs.numpy(), problem.labels.numpy(), problem.target.references.numpy()
    settings = {"start": "input", "batch_size": 2}
    whole = make("FeatureMatching", problem, start="input").generate(x, y, references=groups)
    np.testing.assert_allclose(
        make("FeatureMatching", problem, **settings).generate(x, y, references=groups), whole, atol=1e-6
    )
    turned = make("FeatureMatching", problem, **settings).generate(x, y, references=groups[::-1])
    assert not np.allclose(turned, whole, atol=1e-3)
    shared = make("FeatureMatching", problem, **settings).generate(x, y, references=groups[0])
    each = make("FeatureMatching", problem, **settings).generate(x, y, references=np.stack([groups[0]] * 6))
    assert np.array_equal(shared, each)


@pytest.mark.parametrize(
    ("references", "shown"),
    [
        (None, "references: got None, expected points of other classes"),
        (np.zeros((3, 2, 1, 3, 4)), r"references: got shape \(3, 2, 1, 3, 4\)"),
        (np.zeros((0, 1, 3, 4)), r"references: got shape \(0, 1, 3, 4\)"),
        (np.full((2, 1, 3, 4), 2.0), "references: got values"),
    ],
)
@pytest.mark.parametrize("eps", [0, 0.1])
def test_wrong_references_are_refused(references: Any, shown: str, eps: float) -> None:
    problem = small_defense(4)
    with pytest.raises(InvalidArgumentError, match=shown):
        make("LogitMatching", problem, eps=eps).generate(
            problem.inputs.numpy(), problem.labels.numpy(), references=references
        )


def test_unknown_keywords_are_refused() -> None:
    problem = small_defense(4)
    for name in ("OrthogonalPGD", "LogitMatching"):
        ways = {**keywords(name, problem), "mask": 1}
        with pytest.raises(InvalidArgumentError, match="the keyword 'mask'"):
            make(name, problem).generate(problem.inputs.numpy(), problem.labels.numpy(), **ways)
    with pytest.raises(InvalidArgumentError, match="the keyword 'references'"):
        make("JointLoss", problem).generate(problem.inputs.numpy(), problem.labels.numpy(), references=1)


@pytest.mark.parametrize("labels", [np.full(4, 4), np.eye(5)[[4, 4, 4, 4]]])
def test_being_rejected_is_no_class_to_aim_at(labels: Any) -> None:
    problem = small_defense(4)
    with pytest.raises(InvalidArgumentError, match=r"y: got labels in 4\.\.4"):
        make("JointLoss", problem, targeted=True).generate(problem.inputs.numpy(), labels)


def test_foolbox_gives_the_same_points() -> None:
    twins = pytest.importorskip("robust_ext.adapters.foolbox.attacks", reason="Foolbox is not installed")
    problem = small_defense(5, norm="l2", epsilon=0.8)
    here = make("OrthogonalPGD", problem, seed=2).generate(problem.inputs.numpy(), problem.labels.numpy())
    model = estimators.DefendedPyTorchModel(problem.defended, bounds=(0.0, 1.0))
    there = twins.L2OrthogonalPGDAttack(**QUICK["OrthogonalPGD"], seed=2)
    assert np.array_equal(here, there(model, problem.inputs, problem.labels, epsilons=0.8)[0].numpy())


def test_as_an_attack_of_this_project_it_is_the_core_attack() -> None:
    attack = as_attack(make("JointLoss", small_defense(1), alpha=2.0), name="mine")
    assert isinstance(attack, JointLoss)
    assert (attack.name, attack.traits.detector) == ("mine", True)
    assert attack.alpha == 2.0
