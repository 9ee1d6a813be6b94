"""Fitted estimators as black boxes, against their own predictions."""

import numpy as np
import pytest
import torch

from robust_ext import (
    Targeted,
    ThreatModel,
    as_module,
    evaluate,
    robust_accuracy,
)
from robust_ext.core.errors import RobustExtWarning
from tests.adapters.common import require

sklearn = pytest.importorskip("sklearn")
from sklearn.datasets import load_digits, load_wine  # noqa: E402
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier  # noqa: E402
from sklearn.linear_model import LogisticRegression, RidgeClassifier  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler, minmax_scale  # noqa: E402
from sklearn.svm import SVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

LINF = ThreatModel(norm="linf", epsilon=0.05)


def xgboost(kind="XGBClassifier"):
    return getattr(pytest.importorskip("xgboost"), kind)(n_estimators=5, n_jobs=1)


def lightgbm():
    return pytest.importorskip("lightgbm").LGBMClassifier(n_estimators=5, n_jobs=1, verbose=-1)


ESTIMATORS = {
    "forest": lambda: RandomForestClassifier(10, random_state=0),
    "logistic": lambda: LogisticRegression(max_iter=200),
    "SVC": SVC,
    "SVC with probabilities": lambda: SVC(kernel="poly"),
    "tree": lambda: DecisionTreeClassifier(max_depth=4, random_state=0),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=5, random_state=0),
    "ridge": RidgeClassifier,
    "bayes": GaussianNB,
    "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
    "XGBoost": xgboost,
    "LightGBM": lightgbm,
}


def samples(data, classes):
    inputs, labels = minmax_scale(data.data).astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(inputs))
    rows = order[labels[order] < classes][:400]
    return inputs[rows], labels[rows]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_predictions_are_those_of_the_estimator(name, classes):
    inputs, labels = samples(load_digits(), classes)
    estimator = ESTIMATORS[name]().fit(inputs[:200], labels[:200])
    wide = inputs.astype(np.float64)
    found = as_module(estimator).module(torch.from_numpy(inputs).view(-1, 1, 8, 8))
    assert found.shape == (len(inputs), classes)
    assert np.array_equal(found.argmax(1).numpy(), estimator.predict(wide))
    if name in ("forest", "bayes"):
        expected = np.log(np.maximum(estimator.predict_proba(wide), 1e-30))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    if name == "XGBoost":
        np.testing.assert_allclose(found.softmax(1).numpy(), estimator.predict_proba(wide), rtol=1e-4, atol=1e-5)
        booster = as_module(estimator.get_booster()).module
        torch.testing.assert_close(booster(torch.from_numpy(inputs)), found)
    if name == "LightGBM":
        np.testing.assert_allclose(found.softmax(1).numpy(), estimator.predict_proba(wide), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(as_module(estimator.booster_).module(torch.from_numpy(inputs)), found)


def test_labels_are_places_of_classes():
    inputs, labels = samples(load_wine(), 3)
    estimator = LogisticRegression(max_iter=300).fit(inputs, np.array(["a", "b", "c"])[labels])
    with pytest.warns(RobustExtWarning, match=r"its classes are .*'a'.*labels are their places"):
        module = as_module(estimator).module
    assert np.array_equal(estimator.classes_[module(torch.from_numpy(inputs)).argmax(1)], estimator.predict(inputs))


def test_an_evaluation_of_a_table():
    """RayS by labels, and Square, on vectors."""
    inputs, labels = samples(load_wine(), 3)
    forest = RandomForestClassifier(20, random_state=0).fit(inputs[:120], labels[:120])
    result = evaluate(forest, inputs[120:150], labels[120:150], LINF, budget="quick")
    assert {one["name"] for one in result.content["steps"]} == {"Square", "RayS"}
    assert 0 < result.robust_accuracy < result.content["clean_accuracy"]


def art_forest(forest):
    from robust_ext.adapters.art.library import art

    return art.estimators.classification.SklearnClassifier(model=forest, clip_values=(0, 1))


def art_black_box(forest):
    from robust_ext.adapters.art.library import art

    return art.estimators.classification.BlackBoxClassifier(
        forest.predict_proba, input_shape=(13,), nb_classes=3, clip_values=(0, 1)
    )


def art_labels(forest):
    from robust_ext.adapters.art.library import art

    return art.estimators.classification.BlackBoxClassifier(
        lambda x: np.eye(3)[forest.predict(x)], input_shape=(13,), nb_classes=3, clip_values=(0, 1)
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "returns"), [(art_forest, None), (art_black_box, "probabilities"), (art_labels, "labels")]
)
def test_classifiers_of_art_are_told_by_what_they_return(make, returns):
    require("art")
    inputs, labels = samples(load_wine(), 3)
    forest = RandomForestClassifier(20, random_state=0).fit(inputs[:120], labels[:120])
    classifier = make(forest)
    if returns is None:
        module = as_module(classifier).module
    else:
        with pytest.warns(RobustExtWarning, match=f"look like {returns}"):
            module = as_module(classifier).module
    assert as_module(classifier).bounds == (0.0, 1.0)
    found = module(torch.from_numpy(inputs))
    assert module.labels_only == (returns == "labels")
    assert np.array_equal(found.argmax(1).numpy(), forest.predict(inputs))


def nearest_leaf(tree, x, wanted):
    """The least change in linf of a sample that leads to a leaf of a wanted class, by the boxes of all leaves."""
    found, todo = np.inf, [(0, np.full(len(x), -np.inf), np.full(len(x), np.inf))]
    nodes = tree.tree_
    while todo:
        node, low, high = todo.pop()
        feature, threshold = nodes.feature[node], nodes.threshold[node]
        if nodes.children_left[node] < 0:
            if nodes.value[node].argmax() in wanted:
                found = min(found, np.maximum(low - x, x - high).max().clip(0))
            continue
        left, right = high.copy(), low.copy()
        left[feature], right[feature] = min(high[feature], threshold), max(low[feature], threshold)
        todo += [(nodes.children_left[node], low, left), (nodes.children_right[node], right, high)]
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("criterion", [None, Targeted("next")], ids=repr)
def test_the_decision_tree_attack_is_that_of_art_on_the_tree(criterion):
    require("art")
    from robust_ext.adapters.art.library import art

    inputs, labels = samples(load_wine(), 3)
    tree = DecisionTreeClassifier(max_depth=4, random_state=0).fit(inputs[:120], labels[:120])
    x, y = inputs[120:150], tree.predict(inputs[120:150])
    attack = art.attacks.evasion.DecisionTreeAttack(
        art.estimators.classification.scikitlearn.ScikitlearnDecisionTreeClassifier(tree), verbose=False
    )
    expected = attack.generate(x, None if criterion is None else (y + 1) % 3)
    options = {"criterion": criterion, "keep_candidates": True, "epsilons": [0.05, 1.0]}
    given = "art:DecisionTreeAttack(offset=0.001)", x, y, ThreatModel(norm="linf", epsilon=1.0)
    result = robust_accuracy(tree, *given, **options)
    np.testing.assert_array_equal(result.candidates, np.clip(expected, 0, 1))
    assert (result.robust_accuracy(1.0), result.content["attacks"][0]["passes"]["forward"]) == (0, 0)
    wanted = [{*range(3)} - {one} if criterion is None else {(one + 1) % 3} for one in y]
    exact = np.array([nearest_leaf(tree, *one) for one in zip(x, wanted, strict=True)])
    assert (np.array(result.content["attacks"][0]["distances"]) >= exact - 1e-6).all()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "attack",
    [
        "art:HopSkipJump(max_iter=2, max_eval=20, init_eval=5)",
        "art:BoundaryAttack(max_iter=10)",
        "art:SignOPTAttack(max_iter=2, num_trial=5, k=5)",
        "art:ZooAttack(max_iter=5, nb_parallel=4, binary_search_steps=1, use_resize=False, use_importance=False)",
        "foolbox:HopSkipJumpAttack(steps=2)",
        "foolbox:BoundaryAttack(steps=20)",
        "robust_ext:RandomSearch(points=20)",
    ],
)
def test_attacks_by_labels_and_scores_run(attack):
    require(attack.partition(":")[0]) if not attack.startswith("robust_ext") else None
    inputs, labels = samples(load_wine(), 3)
    forest = RandomForestClassifier(10, random_state=0).fit(inputs[:120], labels[:120])
    l2 = ThreatModel(norm="l2", epsilon=0.5)
    result = robust_accuracy(forest, attack, inputs[120:126], labels[120:126], l2)
    assert result.content["attacks"][0]["robust_accuracy"][0]["not_attacked"] == 0
