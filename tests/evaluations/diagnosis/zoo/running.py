"""What a fault does: planted problems that are missed, accuracy that is not there; and what its diagnosis says."""

import copy

import robust_ext
from robust_ext import AttackError, ModelError
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.random import seeded_globals
from tests.evaluations.diagnosis.zoo.networks import cifar, digits


def samples(fault):
    return cifar(4) if fault.published else tuple(part[:12] for part in digits())


def score(model, attack, fault):
    """The binarization score; 0 where the attack raises or the model is refused, as nothing comes back."""
    settings = {"inner_points": 199, "random_inner": 20, "random_corners": 20, "canaries": 0, "depths": (1,)}
    try:
        result = robust_ext.binarization_test(model, attack, samples(fault)[0], fault.threat_model, **settings)
    except (AttackError, ModelError):
        return 0.0
    return result.content["attacks"][0]["score"]


def accuracy(model, attack, fault):
    ball = fault.threat_model
    return robust_ext.robust_accuracy(model, attack, *samples(fault), ball).robust_accuracy(ball.epsilon)


def accuracy_by_hand(model, attack, fault):
    """What is still right of what a function finds on a model that evaluations refuse, on the model as it should be."""
    inputs, labels = (part.clone() for part in samples(fault))
    with seeded_globals(0):
        found = attack(copy.deepcopy(model), inputs.clone(), labels, epsilon=fault.threat_model.epsilon)
    return float((fault.models()[1](found.clone()).argmax(1) == labels).double().mean())


def remedied(attack, remedy):
    """An attack with the remedy that was found by hand."""
    return remedy if isinstance(remedy, str) else AdaptedAttack(attack=robust_ext.as_attack(attack), **remedy)


def truth(fault):
    """What is measured of the fault and its twin; see :class:`Fault` for what it is."""
    measure = {"score": score, "accuracy": accuracy, "refused": accuracy_by_hand}[fault.harm]
    runs = zip(("fault", "twin"), fault.models(), fault.attacks(), strict=True)
    return {name: measure(model, attack, fault) for name, model, attack in runs}


def harm(fault, diagnoses):
    """The same from the diagnoses, whose numbers are those of the evaluations that they are made of."""
    if fault.harm == "refused":
        return truth(fault)
    key = "score" if fault.harm == "score" else "robust_accuracy"
    # Nothing comes back where the attack raises or the model is refused.
    found = [([one[key] for one in result.content["attacks"]] or [None])[0] for result in diagnoses]
    return {"fault": found[0] or 0.0, "twin": found[1]}


def fixed_by_hand(fault):
    """What is measured of the fault with the remedy that was found by hand."""
    return score(fault.models()[0], remedied(fault.attacks()[0], fault.remedy), fault)


def _diagnosed(model, attack, fault, *, try_remedies):
    given = *samples(fault), fault.threat_model
    return robust_ext.diagnose(model, attack, *given, try_remedies=try_remedies, planted=len(given[0]))


_healthy = {}


def diagnosed(fault, *, try_remedies=True):
    """The diagnoses of the fault, with its remedies tried, and of its twin, which several may share."""
    (faulty, healthy), (attack, twin) = fault.models(), fault.attacks()
    key = fault if fault.of_model else (fault.model, twin, fault.threat_model)
    if key not in _healthy:
        _healthy[key] = _diagnosed(healthy, twin, fault, try_remedies=False)
    return _diagnosed(faulty, attack, fault, try_remedies=try_remedies), _healthy[key]


def first_cause(result):
    return (result.likely.code, result.likely.layer) if result.likely is not None else (None, None)


def _tried(result):
    return [one for one in result.content["tried"] or [] if one["after"] is not None]


def best_trial(result):
    """Of the remedies of the first cause that were tried on planted problems the best: what it is, and the scores.

    None where there is none. The score before is 0 of an attack that raised, and None of a model that is refused.
    """
    tried = [one for one in _tried(result) if one["after"]["score"] is not None]
    tried = [one for one in tried if one["code"] == first_cause(result)[0]]
    if not tried:
        return None
    best = max(tried, key=lambda one: one["after"]["score"])
    before = None if best["before"] is None else best["before"]["score"] or 0.0
    return best["remedy"]["attack"] or best["remedy"]["view"], before, best["after"]["score"]


def _changes(trial):
    """Test score and the share of samples that are not robust, each before and after a remedy, of what is known."""
    before, after = trial["before"] or {}, trial["after"] or {}
    pairs = [(sign, before.get(key), after.get(key)) for key, sign in (("score", 1), ("robust_accuracy", -1))]
    return [(sign * then, sign * now) for sign, then, now in pairs if None not in (then, now)]


def worsened(result):
    """Whether the remedy that is printed first finds less than the attack without it, in either number."""
    for remedy in () if result.likely is None else result.likely.remedies:
        for one in _tried(result):
            if (one["remedy"]["attack"], one["remedy"]["view"]) == (remedy.attack, dict(remedy.view)):
                return any(now < then for then, now in _changes(one))
    return False


def falsely_confirmed(result):
    """The codes of remedies that are called confirmed and find no more than the attack without them."""
    tried = [(one, _changes(one)) for one in result.content["tried"] or [] if one["confirmed"]]
    return [one["code"] for one, pairs in tried if pairs and all(now <= then for then, now in pairs)]
