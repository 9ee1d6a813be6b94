"""A result as texts to publish: a paragraph, a row of a table, and the answer to a published claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.attacks.adapted import FITTED, AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.settings import declared, default_of
from robust_ext.core.tabular import escaped_latex
from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import count, percent, plain, typed

Content = Mapping[str, Any]

CLAIMS = ("refuted", "consistent", "exceeded", "not supported")
"""What becomes of a claim: verified candidates disprove it; a certified attack leaves about as many samples; it leaves
more; or too few were broken to disprove it, by attacks without a certificate."""


def judge_claim(claimed: float, worst: Mapping[str, Any], *, certified: bool) -> str:
    """Return one of :data:`CLAIMS` for a robust accuracy in per cent.

    Broken samples disprove a claim, by any attack; only a certified attack supports one.

    Args:
        claimed: In per cent.
        worst: The worst case with its ``interval``, shares in [0, 1].
        certified: Whether the attack behind it is.

    Example:
        >>> judge_claim(60.0, {"interval": [0.0, 0.028]}, certified=False)
        'refuted'
        >>> judge_claim(60.0, {"interval": [0.5, 0.7]}, certified=False)
        'not supported'
    """
    low, high = worst["interval"]
    if claimed / 100 > high:
        return "refuted"
    if not certified:
        return "not supported"
    return "consistent" if claimed / 100 >= low else "exceeded"


def claim_sentence(content: Content) -> str:
    """Return the answer to the claim in a sentence or two; empty without a claim."""
    claim, worst = content["claim"], content["worst_case"]
    if claim is None:
        return ""
    certificate, claimed = content["certificate"], f"The claim of {claim['claimed']:g}%"
    measured = f"{_percent(worst['robust_accuracy'])}, 95% CI {_interval(worst)}, n = {content['samples']}"
    passes = f"; {certificate['attack']} {_passes(certificate)}" if certificate["certified"] else ""
    if claim["outcome"] == "refuted":
        return f"{claimed} is refuted: {measured}; found by {_finders(content)}{passes}."
    if claim["outcome"] == "not supported":
        return f"{claimed} is not refuted ({measured}), and not supported: no attack behind this number is certified."
    if claim["outcome"] == "consistent":
        return f"{claimed} is consistent with what these attacks leave: {measured}{passes}."
    return (
        f"{claimed} is lower than what these attacks leave: {measured}{passes}. An upper bound does not contradict it; "
        "compare the samples and the attack behind the claim."
    )


def publishable(content: Content) -> str:
    """Return the result in a paragraph."""
    worst, settings, size = content["worst_case"], content["settings"], typed(content["epsilon"])
    if worst is None:
        return f"No attack was run: {content['stopped']}"
    model = settings.get("model_origin")
    of = f"the robust accuracy of {plain(model)}" if model else "robust accuracy"
    of += f" behind the defense {plain(defense)}" if (defense := settings.get("defense_origin")) else ""
    attacks = count(len(content["steps"]), "attack")
    limits = ", within limits of single entries," if "entries" in settings else ""
    return (
        f"On {count(content['samples'], 'sample')} (clean accuracy {_percent(content['clean_accuracy'])}), {of} for "
        f"{content['norm']} perturbations of at most {size}{limits} is at most {_percent(worst['robust_accuracy'])} "
        f"(95% CI {_interval(worst)}): every other sample is misclassified, or broken by a verified adversarial "
        f"example ({attacks} of robust-ext {content['versions']['robust_ext']} evaluate, budget {settings['budget']}, "
        f"seed {content['seed']}).{_criterion(content)}{_judge(content)} "
        f"{_certificate_sentence(content['certificate'])}"
    )


def _certificate_sentence(certificate: Mapping[str, Any]) -> str:
    """Return the certificate in a sentence, or the reason why there is none."""
    if certificate["certified"]:
        return (
            f"The certified attack, {certificate['attack']}, {_passes(certificate)} (Zimmermann et al. 2022): "
            f"it finds the adversarial examples that are planted in this model, to depth {certificate['depth']:g}, and "
            f"random search finds {_percent(certificate['random_score'])} of them."
        )
    words = certificate["words"].removeprefix("not certified: ")
    why = f"{certificate['attack']}: {words}" if certificate["attack"] else words
    return f"No attack behind this number is certified ({why}), so that the true value may be far lower."


def _criterion(content: Content) -> str:
    """Say what counts as broken; empty for misclassification."""
    return f" A sample is broken where {plain(content['criterion'])}." if "criterion" in content else ""


def _judge(content: Content) -> str:
    """Say what a candidate had to get past besides the classifier; empty for a classifier alone."""
    defense, detector = content.get("defense"), content.get("detector")
    if detector is not None:
        return (
            f" A candidate counts only where {plain(detector['name'])} accepts it, which flags "
            f"{_percent(detector['false_positive_rate'])} of these samples without any attack."
        )
    if defense is not None and defense["random"]:
        return f" Predictions are random: it is the mean over {defense['repeats']} fresh draws for each candidate."
    return ""


def _cells(content: Content) -> dict[str, str]:
    worst, certificate = content["worst_case"], content["certificate"]
    return {
        "model": plain(content["settings"].get("model_origin", "model")),
        "threat model": f"{content['norm']}, {typed(content['epsilon'])}",
        "n": str(content["samples"]),
        "clean": percent(content["clean_accuracy"]),
        "robust, at most": "-" if worst is None else f"{percent(worst['robust_accuracy'])} ({_interval(worst)})",
        "certificate": f"{certificate['found']}/{certificate['planted']}, depth {certificate['depth']:g}"
        if certificate["certified"]
        else "none",
    }


def markdown_row(content: Content) -> str:
    """Return a Markdown table of one row."""
    cells = {key: value.replace("|", "\\|") for key, value in _cells(content).items()}
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells.keys(), ["---"] * len(cells), cells.values()))


def latex_row(content: Content) -> str:
    """Return a row of a LaTeX table with a comment that names its columns; text is escaped."""
    cells = _cells(content)
    shown = [escaped_latex(one) for one in cells.values()]
    norm, size = content["norm"], typed(content["epsilon"])
    shown[list(cells).index("threat model")] = f"${_LATEX_NORMS[norm]}$, $\\epsilon = {size}$"
    return f"% {' & '.join(cells)}\n{' & '.join(shown)} \\\\"


_LATEX_NORMS = {"linf": r"\ell_\infty", "l2": r"\ell_2", "l1": r"\ell_1"}


def _finders(content: Content) -> str:
    """The attacks that broke samples, those with most first, at most three, with how many."""
    found = sorted((one for one in content["steps"] if one["broken"]), key=lambda one: -one["broken"])
    return ", ".join(f"{one['name']} ({one['broken']})" for one in found[:3]) or "no attack (all are misclassified)"


def _passes(certificate: Mapping[str, Any]) -> str:
    return f"passes the binarization test at {certificate['found']} of {certificate['planted']}"


def _percent(share: float | None) -> str:
    return f"{percent(share)}%"


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"{percent(low)} to {percent(high)}"


def host_code(attack: Attack, threat_model: ThreatModel) -> dict[str, str]:
    """Return lines of Python that run an attack of this project in Foolbox and in ART, by library; empty for others."""
    view: Mapping[str, Any] = {}
    if isinstance(attack, AdaptedAttack):
        view = {name: one for name, one in attack.adaptation.items() if one != default_of(AdaptedAttack, name)}
        attack = attack.attack
    names = {"bpda": "layer", "gradient_mode": "backward"}
    known = threat_model.plain and view.keys() <= names.keys() and view.get("gradient_mode") != FITTED
    if not isinstance(attack, NativeAttack) or not known or attack.traits.normless:
        return {}
    kind, norm, low, high = type(attack), threat_model.norm, *threat_model.bounds
    wrapped = "model"
    if view:
        wrapped = f"robust_ext.BPDA(model, {', '.join(f'{names[key]}={one!r}' for key, one in view.items())})"
    imports = "import robust_ext\n" if view else ""
    stem = f"{norm.capitalize()}{kind.__name__}"
    own, size = _host_settings(attack, "foolbox"), typed(threat_model.epsilon, ".8g")
    foolbox = (
        f"{imports}import foolbox\nfrom robust_ext.adapters.foolbox import attacks\n\n"
        f"fmodel = foolbox.PyTorchModel({wrapped}, bounds=({low:g}, {high:g}))\n"
        f"attack = attacks.{stem if stem in _SHORT else stem + 'Attack'}({own})\n"
        f"_, candidates, success = attack(fmodel, inputs, labels, epsilons={size})\n"
    )
    number = {"linf": '"inf"', "l2": "2", "l1": "1"}[norm]
    own = ", ".join(
        filter(None, [f"norm={number}", f"eps={size}" * _has_epsilon(attack), _host_settings(attack, "art")])
    )
    art = (
        f"{imports}import torch\nfrom art.estimators.classification import PyTorchClassifier\n"
        f"from robust_ext.adapters.art.attacks import {kind.__name__}\n\n"
        f"classifier = PyTorchClassifier(\n    {wrapped},\n    loss=torch.nn.CrossEntropyLoss(),\n"
        f"    input_shape=inputs.shape[1:],\n    nb_classes=model(inputs[:1]).shape[1],\n"
        f"    clip_values=({low:g}, {high:g}),\n)\n"
        f"candidates = {kind.__name__}(classifier, {own}).generate(inputs.numpy(), labels.numpy())\n"
    )
    return {"foolbox": foolbox, "art": art}


_SHORT = {f"{norm}{name}" for norm in ("Linf", "L2", "L1") for name in ("APGD", "ObjectivePGD")}


def _has_epsilon(attack: NativeAttack) -> bool:
    return type(attack).stops_at_epsilon or not attack.traits.minimum_norm


def _host_settings(attack: NativeAttack, host: str) -> str:
    """Return the settings that are no defaults, as keywords of a library's class."""
    found = {}
    for name, info in declared(type(attack)).items():
        value, given = getattr(attack, name), info.names.get(host, name)
        if given is not None and value != default_of(type(attack), name):
            found[given] = value == "random" if given == "random_start" else value
    return ", ".join(f"{name}={value!r}" for name, value in found.items())
