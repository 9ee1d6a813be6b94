"""Fitted classifiers of scikit-learn, XGBoost and LightGBM as black boxes. Importing this imports none of them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from robust_ext.core.errors import InvalidArgumentError, ModelError, warn
from robust_ext.models.black_box import BlackBox
from robust_ext.registry.base import AdaptedModel, Adapter, comes_from

_LIBRARIES = ("sklearn", "xgboost", "lightgbm")


class Estimator:
    """The outputs of a fitted classifier for inputs ``(N, ...)``, which are flattened to rows of features.

    Attributes:
        returns: ``"logits"`` where it has decision values or margins, else ``"probabilities"`` or ``"labels"``.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.margin: dict[str, Any] = {}
        if type(estimator).__name__ == "Booster":
            self.method, self.returns = "predict", "logits"
            self.margin = {"output_margin": True} if comes_from(estimator, "xgboost") else {"raw_score": True}
        elif comes_from(estimator, "xgboost") and hasattr(estimator, "predict_proba"):
            self.method, self.returns, self.margin = "predict", "logits", {"output_margin": True}
        elif comes_from(estimator, "lightgbm") and hasattr(estimator, "predict_proba"):
            self.method, self.returns, self.margin = "predict_proba", "logits", {"raw_score": True}
        else:
            named = {"decision_function": "logits", "predict_proba": "probabilities", "predict": "labels"}
            self.method = next((one for one in named if hasattr(estimator, one)), "")
            self.returns = named.get(self.method, "")
        # Its votes are broken by other rules than the decision values that are returned for them.
        self.settled = type(estimator).__name__ in ("SVC", "NuSVC") and len(estimator.classes_) > 2

    @property
    def classes(self) -> int | None:
        """Number of classes; None of a booster, which does not say."""
        found = getattr(self.estimator, "classes_", None)
        return None if found is None else len(found)

    def __call__(self, x: Any) -> Any:
        """Return scores ``(N, K)`` or ``(N,)``, or places of labels in ``classes_`` ``(N,)``."""
        # In float32, some lose their precision.
        rows = x.reshape(len(x), -1).astype(np.float64)
        if comes_from(self.estimator, "xgboost") and type(self.estimator).__name__ == "Booster":
            import xgboost

            rows = xgboost.DMatrix(rows, feature_names=self.estimator.feature_names)
        with warnings.catch_warnings():
            # Fitted on a frame, it needs the names of columns; only their order counts.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            found = np.asarray(getattr(self.estimator, self.method)(rows, **self.margin))
            if self.returns == "labels":
                return np.searchsorted(self.estimator.classes_, found)
            if self.settled:
                chosen = np.searchsorted(self.estimator.classes_, self.estimator.predict(rows))
                best = found.max(1)
                found[np.arange(len(found)), chosen] = np.where(found.argmax(1) == chosen, best, best + 1e-3)
        return found


def estimator_model(estimator: Any) -> BlackBox:
    """Return a fitted classifier as a black box: inputs ``(N, ...)`` are flattened, labels are places in ``classes_``.

    Scores are its decision function or margins, else logarithms of its probabilities, else there are labels alone.

    Args:
        estimator: A fitted classifier or pipeline of scikit-learn, an ``XGBClassifier``, ``LGBMClassifier``, or a
            booster of theirs for classification.

    Raises:
        InvalidArgumentError: It is not fitted, or no classifier.
    """
    booster = type(estimator).__name__ == "Booster"
    if not booster and (isinstance(estimator, type) or not hasattr(estimator, "classes_")):
        got = f"the class {estimator.__name__}" if isinstance(estimator, type) else type(estimator).__name__
        raise InvalidArgumentError("model", got, "a fitted classifier, which has classes_; call fit first")
    made = Estimator(estimator)
    if not booster:
        if getattr(estimator.classes_, "ndim", 1) != 1 or isinstance(estimator.classes_, list):
            raise ModelError("model: it predicts several labels for each input, expected one; pass one output of it")
        if list(estimator.classes_) != list(range(len(estimator.classes_))):
            shown = ", ".join(map(repr, estimator.classes_[:4]))
            warn(
                f"model: its classes are {shown}{', ...' * (len(estimator.classes_) > 4)}; labels are their places, "
                "from 0: numpy.searchsorted(model.classes_, labels)"
            )
    return BlackBox(made, returns=made.returns, classes=made.classes)


def fitted_tree(module: object) -> Any:
    """Return the decision tree that a module is the black box of; None where it is another model."""
    predict = module.predict if isinstance(module, BlackBox) else None
    estimator = predict.estimator if isinstance(predict, Estimator) else None
    return estimator if type(estimator).__name__ == "DecisionTreeClassifier" else None


class SklearnAdapter(Adapter):
    """Estimators with the interface of scikit-learn, and boosters."""

    name = "sklearn"

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """Wrap a fitted classifier; regressors and other objects are none."""
        if not any(comes_from(model, one) for one in _LIBRARIES) or not hasattr(model, "predict"):
            return None
        return AdaptedModel(module=estimator_model(model), bounds=None)


ADAPTER = SklearnAdapter()
