"""The tasks of models that are no classifiers, named by what they return or by their inputs and labels.

Each text states the support of a task, with the lines that make a classifier of the model, if any.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ONLY = "evaluations here are of classifiers, with one class for each input"
TOKENS = (
    "token ids, as of a language model, have no ball around them to search; a classifier of text can be evaluated on "
    "its embeddings: give it as a module from them, as in logits = model(inputs_embeds=x).logits, with inputs "
    "x = model.get_input_embeddings()(ids).detach() and bounds that hold their values"
)
OWN_GRADIENTS = (
    "it runs where gradients are switched on: a model that optimises while it runs is a defense that acts at test "
    "time, for robust_ext.evaluate_defense(model, None, inputs, labels, threat_model, classifier=static_model) "
    "(robust-ext test-time), or switches gradients on itself (torch.enable_grad())"
)
SIGMOIDS = (
    "columns of sigmoids, as a multi-label model returns, expected logits: return what the sigmoid is taken of. With "
    "labels (N, L) of zeros and ones, give robust_accuracy, evaluate or mead criterion=robust_ext.MultiLabel() "
    "(--multi-label all); elsewhere, the decision about one class k is robust_ext.models.outputs.TwoClass(module), "
    "where module returns column k of that"
)
_BOXES = (
    f"the outputs of a detection model (boxes). Detection is not supported: {ONLY}. To evaluate the classes of whole "
    "images, return the highest score of each class: torch.stack([torch.zeros(K).index_reduce(0, found['labels'], "
    "found['scores'], 'amax') for found in self.model(x)])"
)


def name_output(output: object, rows: int, inputs: Tensor) -> str:
    """Describe an output for ``rows`` rows like ``inputs`` that is not ``(rows, K)``: its type, task and wrapper."""
    if _holds_boxes(output):
        return f"returned {_BOXES}"
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, expected a floating point tensor of logits ({rows}, K)"
    shape = f"returned shape {tuple(output.shape)} for {rows} inputs, expected logits ({rows}, K)"
    if not output.is_floating_point():
        return (
            f"returned dtype {output.dtype}, expected a floating point tensor of logits ({rows}, K): predicted classes "
            "have no gradients and no margins, so return what their argmax is taken of"
        )
    if output.dim() == 0:
        return f"{shape}: a single number for all inputs, such as a loss, is no prediction; return the logits"
    if rows == 1 and output.dim() == 1 and len(output) > 1:
        return (
            f"{shape}: a squeeze() without a dimension drops the batch of a single row; leave it out, or name its dim"
        )
    if len(output) != rows:
        return f"{shape}: one row for each input, for batches of any size"
    if output.dim() == 3:
        return (
            f"{shape}: scores at several positions, as of a language model, of sequence labelling or of a detector. "
            f"These are not supported: {ONLY}. Return the scores of one position, self.model(x)[:, -1], or their mean, "
            "self.model(x).mean(1)"
        )
    if output.dim() > 3 and output[0, 0].numel() == 1:
        return f"{shape}: return self.model(x).flatten(1)"
    if output.dim() > 3 and output.shape == inputs.shape:
        return (
            f"{shape}: an image for each input, as of an autoencoder, a denoiser or a generator. These are not "
            "supported as models; one that purifies inputs is a defense, for robust_ext.evaluate_defense(purifier, "
            "None, inputs, labels, threat_model, classifier=classifier)"
        )
    if output.dim() > 3:
        return (
            f"{shape}: scores of each pixel, as of a segmentation model. Segmentation is not supported: {ONLY}. To "
            "evaluate the class of one pixel, return self.model(x)[:, :, row, column], or of a whole image, "
            "self.model(x).mean((2, 3)), with labels of your own for it"
        )
    return shape


def name_entries(output: object) -> str | None:
    """The task of an object or dict without any tensor that may be logits; None where nothing names it."""
    if _holds_boxes(output):
        return _BOXES
    if {"last_hidden_state", "pooler_output"} & _names(output):
        return (
            "the features of a network without a classifier (embeddings). Put a head behind them, as in "
            "logits = head(model(x).last_hidden_state[:, 0]), or load the model with its head "
            "(AutoModelForImageClassification)"
        )
    return None


def name_labels(labels: Tensor) -> str | None:
    """The task of labels ``(N, ...)`` that are no class indices; None where they may be indices of any type."""
    if labels.is_complex() or labels.is_meta or not labels.numel():
        return None
    zeros_and_ones = bool(((labels == 0) | (labels == 1)).all())
    if labels.dim() == 2 and labels.shape[1] > 1 and zeros_and_ones:
        return (
            "multi-label targets (rows with other than a single 1): give robust_accuracy, evaluate or mead "
            "criterion=robust_ext.MultiLabel() (--multi-label all); elsewhere, the decision about one class k is "
            "labels[:, k] with robust_ext.models.outputs.TwoClass(module), where module returns self.model(x)[:, k]"
        )
    if labels.dim() == 2 and labels.is_floating_point() and bool(((labels.sum(1) - 1).abs() < 1e-4).all()):
        return "soft labels (rows that sum to one): give labels.argmax(1)"
    if labels.dim() >= 3:
        return f"a class for each pixel or position, as of segmentation. Segmentation is not supported: {ONLY}"
    if labels.is_floating_point() and bool((labels != labels.round()).any()):
        return (
            f"targets of a regression. Regression is not supported: {ONLY}. To evaluate a decision such as whether the "
            "value lies above a limit, give labels (targets > limit).long() and "
            "robust_ext.models.outputs.TwoClass(module), where module returns self.model(x)[:, 0] - limit"
        )
    return None


def _names(output: object) -> set[str]:
    if isinstance(output, Mapping):
        return set(map(str, output))
    return set(getattr(output, "__dict__", ()))


def _holds_boxes(output: object) -> bool:
    if isinstance(output, (list, tuple)):
        return any(isinstance(one, Mapping) and _holds_boxes(one) for one in output)
    return any("box" in name for name in _names(output))
