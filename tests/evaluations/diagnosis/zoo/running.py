"""What a fault does, measured without the diagnosis: planted problems that are missed, accuracy that is not there."""

import copy
from functools import lru_cache

import robust_ext
from robust_ext import AttackError, ModelError
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.random import seeded_globals
from tests.evaluations.diagnosis.zoo.networks import digits
from tests.evaluations.diagnosis.zoo.published import cifar

SETTINGS = {"inner_points": 199, "random_inner": 20, "random_corners": 20}


def samples(fault):
    """Inputs and labels."""
    return cifar(8) if fault.published else tuple(part[:12] for part in digits())


def score(model, attack, fault):
    """The binarization score; 0 where the attack raises or the model is refused, as nothing comes back."""
    inputs, _ = samples(fault)
    try:
        result = robust_ext.binarization_test(model, attack, inputs, fault.threat_model, canaries=0, **SETTINGS)
    except (AttackError, ModelError):
        return 0.0
    return result.content["attacks"][0]["score"]


def accuracy(model, attack, fault):
    """Robust accuracy as evaluations state it."""
    inputs, labels = samples(fault)
    ball = fault.threat_model
    return robust_ext.robust_accuracy(model, attack, inputs, labels, ball).robust_accuracy(ball.epsilon)


def accuracy_by_hand(model, attack, fault):
    """What is still right of what a function finds on a model that evaluations refuse, on the model as it should be."""
    inputs, labels = (part.clone() for part in samples(fault))
    with seeded_globals(0):
        found = attack(copy.deepcopy(model), inputs.clone(), labels, epsilon=fault.threat_model.epsilon)
    return float((fault.models()[1](found.clone()).argmax(1) == labels).double().mean())


def remedied(attack, remedy):
    """An attack with the remedy that was found by hand."""
    if isinstance(remedy, str):
        return remedy
    return AdaptedAttack(attack=robust_ext.as_attack(attack), **remedy)


@lru_cache
def truth(fault):
    """What is measured of the fault, its twin and its remedy; see :class:`Fault` for what it is."""
    (faulty, healthy), (attack, twin) = fault.models(), fault.attacks()
    measure = {"score": score, "accuracy": accuracy, "refused": accuracy_by_hand}[fault.harm]
    found = {"fault": measure(faulty, attack, fault), "twin": measure(healthy, twin, fault)}
    if fault.remedy is not None:
        found["remedy"] = measure(faulty, remedied(attack, fault.remedy), fault)
    return found


@lru_cache
def diagnosed(fault, *, try_remedies=True):
    """The diagnoses of the fault, with its remedies tried, and of its twin."""
    inputs, labels = samples(fault)
    (faulty, healthy), (attack, twin) = fault.models(), fault.attacks()
    given, settings = (inputs, labels, fault.threat_model), {"planted": len(inputs)}
    return (
        robust_ext.diagnose(faulty, attack, *given, try_remedies=try_remedies, **settings),
        robust_ext.diagnose(healthy, twin, *given, **settings),
    )


def first_cause(result):
    """Code and layer of the most likely cause."""
    return (result.likely.code, result.likely.layer) if result.likely is not None else (None, None)


def best_trial(result):
    """Of the remedies of the first cause that were tried on planted problems the best: what it is, and the scores.

    None where there is none. The score before is 0 of an attack that raised, and None of a model that is refused.
    """
    tried = [one for one in result.content["tried"] or [] if one["after"] and one["after"]["score"] is not None]
    tried = [one for one in tried if one["code"] == first_cause(result)[0]]
    if not tried:
        return None
    best = max(tried, key=lambda one: one["after"]["score"])
    remedy = best["remedy"]
    before = None if best["before"] is None else best["before"]["score"] or 0.0
    return remedy["attack"] or remedy["view"], before, best["after"]["score"]


def first_remedy(result):
    """Of the remedies of the first cause that were run the one that is printed first, as it was tried; None of none."""
    if result.likely is None:
        return None
    tried = [one for one in result.content["tried"] or [] if one["after"] is not None]
    for remedy in result.likely.remedies:
        for one in tried:
            if (one["remedy"]["attack"], one["remedy"]["view"]) == (remedy.attack, dict(remedy.view)):
                return one
    return None


def numbers(trial):
    """Test score and the share of samples that are not robust, before and after a remedy; None where not known."""
    found = []
    for state in (trial["before"] or {}, trial["after"] or {}):
        score, robust = state.get("score"), state.get("robust_accuracy")
        found.append((score, None if robust is None else 1 - robust))
    return found


def worsened(result):
    """Whether the remedy that is printed first finds less than the attack without it, in either number."""
    trial = first_remedy(result)
    if trial is None:
        return False
    pairs = zip(*numbers(trial), strict=True)
    return any(then is not None and now is not None and now < then for then, now in pairs)


def falsely_confirmed(result):
    """The codes of remedies that are called confirmed and find no more than the attack without them."""
    found = []
    for one in result.content["tried"] or []:
        pairs = [pair for pair in zip(*numbers(one), strict=True) if None not in pair]
        if one["confirmed"] and pairs and all(now <= then for then, now in pairs):
            found.append(one["code"])
    return found
