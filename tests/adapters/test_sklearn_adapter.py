"""Fitted estimators as black boxes, against their own predictions."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from robust_ext import Targeted, ThreatModel, as_module, robust_accuracy
from robust_ext.core.errors import RobustExtWarning
from tests.adapters.common import require

sklearn = pytest.importorskip("sklearn")
from sklearn.datasets import load_digits, load_wine  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import LogisticRegression, RidgeClassifier  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler, minmax_scale  # noqa: E402
from sklearn.svm import SVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future")]


ESTIMATORS = {
    "forest": lambda: RandomForestClassifier(10, random_state=0),
    "logistic": lambda: LogisticRegression(max_iter=200),
    "SVC": lambda: SVC(kernel="poly"),
    "tree": lambda: DecisionTreeClassifier(max_depth=4, random_state=0),
    "ridge": RidgeClassifier,
    "bayes": GaussianNB,
    "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
    "XGBoost": lambda: pytest.importorskip("xgboost").XGBClassifier(n_estimators=5, n_jobs=1),
    "LightGBM": lambda: pytest.importorskip("lightgbm").LGBMClassifier(n_estimators=5, n_jobs=1, verbose=-1),
}


def samples(data, classes):
    inputs, labels = minmax_scale(data.data).astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(inputs))
    rows = order[labels[order] < classes][:400]
    return inputs[rows], labels[rows]


WINE, KINDS = samples(load_wine(), 3)


def forest():
    return RandomForestClassifier(20, random_state=0).fit(WINE[:120], KINDS[:120])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_predictions_are_those_of_the_estimator(name, classes):
    inputs, labels = samples(load_digits(), classes)
    estimator = ESTIMATORS[name]().fit(inputs[:200], labels[:200])
    # On noise, votes of an SVC are not its decision values.
    inputs = np.concatenate([inputs, np.random.default_rng(1).random((400, 64), dtype=np.float32)])
    wide = inputs.astype(np.float64)
    found = as_module(estimator).module(torch.from_numpy(inputs).view(-1, 1, 8, 8))
    assert found.shape == (len(inputs), classes)
    assert np.array_equal(found.argmax(1).numpy(), estimator.predict(wide))
    if name in ("forest", "bayes", "XGBoost", "LightGBM"):
        np.testing.assert_allclose(found.softmax(1).numpy(), estimator.predict_proba(wide), rtol=1e-4, atol=1e-5)
    if name in ("XGBoost", "LightGBM"):
        booster = estimator.get_booster() if name == "XGBoost" else estimator.booster_
        torch.testing.assert_close(as_module(booster).module(torch.from_numpy(inputs)), found)


def test_labels_are_places_of_classes():
    estimator = LogisticRegression(max_iter=300).fit(WINE, np.array(["a", "b", "c"])[KINDS])
    with pytest.warns(RobustExtWarning, match=r"its classes are .*'a'.*labels are their places"):
        module = as_module(estimator).module
    assert np.array_equal(estimator.classes_[module(torch.from_numpy(WINE)).argmax(1)], estimator.predict(WINE))


@pytest.mark.parametrize("returns", [None, "probabilities", "labels"])
def test_classifiers_of_art_are_told_by_what_they_return(returns):
    classification, fitted, warned = require("art").estimators.classification, forest(), nullcontext()
    classifier = classification.SklearnClassifier(model=fitted, clip_values=(0, 1))
    if returns is not None:
        predict = fitted.predict_proba if returns == "probabilities" else lambda x: np.eye(3)[fitted.predict(x)]
        classifier = classification.BlackBoxClassifier(predict, (13,), 3, clip_values=(0, 1))
        warned = pytest.warns(RobustExtWarning, match=f"look like {returns}")
    with warned:
        adapted = as_module(classifier)
    assert adapted.bounds == (0.0, 1.0)
    assert adapted.module.labels_only == (returns == "labels")
    assert np.array_equal(adapted.module(torch.from_numpy(WINE)).argmax(1).numpy(), fitted.predict(WINE))


@pytest.mark.parametrize("criterion", [None, Targeted("next")], ids=repr)
def test_the_decision_tree_attack_is_that_of_art_on_the_tree(criterion):
    art = require("art")
    tree = DecisionTreeClassifier(max_depth=4, random_state=0).fit(WINE[:120], KINDS[:120])
    x, y = WINE[120:150], tree.predict(WINE[120:150])
    theirs = art.estimators.classification.scikitlearn.ScikitlearnDecisionTreeClassifier(tree)
    attack = art.attacks.evasion.DecisionTreeAttack(theirs, verbose=False)
    expected = attack.generate(x, None if criterion is None else (y + 1) % 3)
    given = tree, "art:DecisionTreeAttack(offset=0.001)", x, y, ThreatModel(norm="linf", epsilon=1.0)
    result = robust_accuracy(*given, criterion=criterion, keep_candidates=True, epsilons=[0.05, 1.0])
    np.testing.assert_array_equal(result.candidates, np.clip(expected, 0, 1))
    assert (result.robust_accuracy(1.0), result.content["attacks"][0]["passes"]["forward"]) == (0, 0)
