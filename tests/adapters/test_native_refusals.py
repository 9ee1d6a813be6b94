"""Wrong settings and arguments of the classes that Foolbox and ART have of this project's attacks raise, by name."""

import numpy as np
import pytest

from robust_ext.core.errors import InvalidArgumentError, ModelError
from tests.adapters.hosts import (
    HOSTS,
    OBJECTIVES,
    SHAPE,
    art,
    art_attacks,
    class_of,
    foolbox,
    in_words_of,
    problem,
)

EACH_VALUE = np.linspace(0.1, 0.2, 16).reshape(SHAPE)
NAN = float("nan")


@HOSTS
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("APGD", {"steps": 0}),
        ("RandomSearch", {"outer_share": 2}),
        ("ObjectivePGD", {"step_size": 0.1, "rel_step_size": NAN}),
        ("CarliniWagnerLinf", {"steps": 0}),
        ("SpatialTransformation", {"rotation_steps": 2}),
        ("LinearRegion", {"starts": ("far",)}),
        ("LinearRegion", {"seed": -1}),
    ],
    ids=str,
)
def test_settings_raise_where_the_attack_is_made(host, name, wrong):
    kind = class_of(host, name, "linf")
    chosen = in_words_of(kind, wrong)
    with pytest.raises(InvalidArgumentError, match=f"^{list(chosen)[-1]}: got"):
        kind(*[problem().estimator] * (host == "art"), **chosen)


@pytest.mark.parametrize(
    ("name", "settings", "ways", "words"),
    [
        ("APGD", {"eps": np.array([0.1, 0.2])}, {}, r"eps: got shape \(2,\).*\(6, 1, 1, 1\)"),
        ("APGD", {"eps": EACH_VALUE, "norm": 2}, {}, r"eps: got an array of shape \(1, 4, 4"),
        ("RayS", {"eps": EACH_VALUE}, {}, "eps: got an array"),
        ("ObjectivePGD", {"eps": np.linspace(0.1, 0.2, 4), "eps_step": 0.01}, {}, "eps_step: got shares"),
        ("APGD", {}, {"mask": np.ones((2, 4, 4))}, r"mask: got shape \(2, 4, 4\)"),
        ("APGD", {}, {"mask": np.ones(SHAPE, dtype=int)}, "mask: got dtype"),
        ("APGD", {}, {"mask": -np.ones(SHAPE)}, "mask: got values"),
        ("APGD", {}, {"mask": np.full(SHAPE, np.nan)}, "mask: got values"),
        ("RandomSearch", {}, {"maks": np.ones(SHAPE)}, r"'maks', expected x, y, mask, x_init"),
        *(
            ("APGD", {}, {"y": wrong}, "y: got")
            for wrong in (np.array([0, 1, 2]), np.array([0, 1, 2, 3, 4, 0]), np.eye(6))
        ),
        ("APGD", {}, {"y": np.array([0, 1, 2, 3, -1, 0])}, "y: got labels in -1..3"),
        ("APGD", {}, {"x": np.full((6, *SHAPE), -1e-4, dtype=np.float32)}, "bounds"),
    ],
)
def test_arguments_of_generate_raise(name, settings, ways, words):
    at = problem()
    attack = getattr(art_attacks, name)(at.estimator, verbose=False, **settings)
    with pytest.raises(InvalidArgumentError, match=words):
        attack.generate(**{"x": at.x.numpy(), "y": at.y.numpy(), **ways})


def test_estimators_need_clip_values_gradients_and_preprocessing_in_pytorch():
    squeezing = art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1))
    for name, ways, error, words in (
        ("APGD", {"bounds": None}, InvalidArgumentError, "clip_values=None"),
        ("RandomSearch", {"bounds": None}, InvalidArgumentError, "clip_values=None"),
        ("APGD", {"preprocessing_defences": squeezing}, ModelError, "FeatureSqueezing"),
    ):
        at = problem(**ways)
        with pytest.raises(error, match=words):
            getattr(art_attacks, name)(at.estimator, verbose=False).generate(at.x.numpy(), at.y.numpy())
    blind = art.estimators.classification.BlackBoxClassifier(
        lambda x: np.eye(4)[np.zeros(len(x), dtype=int)], input_shape=SHAPE, nb_classes=4, clip_values=(0, 1)
    )
    for kind in (art_attacks.APGD, art_attacks.ObjectivePGD, art_attacks.CarliniWagnerLinf):
        with pytest.raises(art.exceptions.EstimatorError):
            kind(blind)


@HOSTS
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [("RayS", {}, "cannot aim"), *(("ObjectivePGD", {"objective": one}, f"'{one}'.*'ace'") for one in OBJECTIVES[1:])],
)
def test_attacks_that_cannot_aim_refuse_to(host, name, settings, words):
    at, kind = problem(), class_of(host, name)
    for epsilon in (0.1, 0.0) if host == "foolbox" else ():
        with pytest.raises(InvalidArgumentError, match=f"criterion: got Targeted.*{words}"):
            kind(**settings)(at.model, at.x, foolbox.criteria.TargetedMisclassification(at.y), epsilons=epsilon)
    if host == "art":
        with pytest.raises(InvalidArgumentError, match=f"targeted: got True.*{words}"):
            kind(at.estimator, targeted=True, **settings)
