"""Models without gradients: good and crippled attacks told apart, and robust accuracy next to ART's own numbers.

    python benchmarks/black_boxes.py [--samples 32] [--models forest,logistic,...] [--data digits,cancer,wine]

XGBoost and LightGBM are left out where they are not installed. docs/evidence/frameworks.md has its output.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import minmax_scale
from sklearn.svm import SVC

from robust_ext import RobustExtWarning, ThreatModel, binarization_test, evaluate, robust_accuracy
from robust_ext.adapters.art.library import art

THREAT = ThreatModel(norm="linf", epsilon=0.1)
HOP = {"max_iter": 5, "max_eval": 100, "init_eval": 20}
ATTACKS = {
    "HopSkipJump": "foolbox:HopSkipJumpAttack(steps=8, max_gradient_eval_steps=300)",
    "HopSkipJump, 1 step of 5": "foolbox:HopSkipJumpAttack(steps=1, initial_gradient_eval_steps=5)",
    "Square": "robust_ext:Square(queries=500)",
    "Square, 10 queries": "robust_ext:Square(queries=10)",
}


def load(name: str) -> tuple[Any, Any, Any, Any]:
    """Return inputs in [0, 1] and labels to fit with, and others to attack."""
    given = {"digits": load_digits, "cancer": load_breast_cancer, "wine": load_wine}[name]()
    order = np.random.default_rng(0).permutation(len(given.data))
    inputs, labels = minmax_scale(given.data)[order].astype(np.float32), given.target[order]
    count = 2 * len(order) // 3
    return inputs[:count], labels[:count], inputs[count:], labels[count:]


def models() -> dict[str, Any]:
    """Return unfitted classifiers."""
    found: dict[str, Any] = {
        "forest": RandomForestClassifier(20, random_state=0),
        "logistic": LogisticRegression(max_iter=2000),
        "SVC": SVC(),
    }
    if importlib.util.find_spec("xgboost"):
        import xgboost

        found["XGBoost"] = xgboost.XGBClassifier(n_estimators=20, n_jobs=1)
    if importlib.util.find_spec("lightgbm"):
        import lightgbm

        found["LightGBM"] = lightgbm.LGBMClassifier(n_estimators=20, n_jobs=1, verbose=-1)
    return found


def by_art(model: Any, inputs: Any, labels: Any) -> float:
    """Return the robust accuracy that ART's HopSkipJump comes to on ART's own classifier, counted by hand."""
    estimator = art.estimators.classification.BlackBoxClassifier(
        lambda x: np.eye(len(model.classes_))[model.predict(x)],
        input_shape=inputs.shape[1:],
        nb_classes=len(model.classes_),
        clip_values=(0, 1),
    )
    np.random.seed(0)
    found = art.attacks.evasion.HopSkipJump(estimator, norm=np.inf, verbose=False, **HOP).generate(inputs)
    inside = np.abs(found - inputs).max(1) <= THREAT.epsilon + 1e-6
    broken = inside & (model.predict(found) != labels)
    return float(((model.predict(inputs) == labels) & ~broken).mean())


def row(model: Any, data: str, inputs: Any, labels: Any) -> list[str]:
    """Return the cells of a model."""
    shaped = inputs.reshape(-1, 1, 8, 8) if data == "digits" else inputs
    cells = []
    for name, text in ATTACKS.items():
        test = binarization_test(model, {name: text}, shaped, THREAT)
        (entry,) = test.content["attacks"]
        cells.append(f"{entry['verdict']}, {entry['outcomes']['found']} of {entry['samples']}")
    few = slice(12)
    settings = ", ".join(f"{key}={value}" for key, value in HOP.items())
    ours = robust_accuracy(model, f"art:HopSkipJump({settings})", inputs[few], labels[few], THREAT)
    cells.append(f"{ours.content['attacks'][0]['robust_accuracy'][0]['robust_accuracy']:.3f}")
    cells.append(f"{by_art(model, inputs[few], labels[few]):.3f}")
    whole = evaluate(model, shaped, labels, THREAT, budget="quick")
    return [*cells, f"{whole.robust_accuracy:.3f}, {whole.verdict}"]


def main() -> None:
    """Print a row for each data set and model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--models", default="")
    parser.add_argument("--data", default="digits,cancer,wine")
    given = parser.parse_args()
    warnings.simplefilter("ignore", RobustExtWarning)
    print("|", " | ".join(["", *ATTACKS, "robust by HopSkipJump", "by ART alone", "`evaluate`", "CPU s"]), "|")
    for data in given.data.split(","):
        fit_inputs, fit_labels, inputs, labels = load(data)
        for name, model in models().items():
            if given.models and name not in given.models.split(","):
                continue
            begun = time.process_time()
            model.fit(fit_inputs, fit_labels)
            cells = row(model, data, inputs[: given.samples], labels[: given.samples])
            taken = f"{time.process_time() - begun:.0f}"
            print("|", " | ".join([f"{data}, {name}", *cells, taken]), "|", flush=True)


if __name__ == "__main__":
    main()
