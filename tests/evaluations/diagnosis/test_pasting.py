"""Remedies as they are printed: pasted by the caller that they were printed for, they run and find no less.

Callers are Python with a module, a Foolbox model or an ART classifier, and the command line.
"""

from functools import partial

import pytest
import torch

import robust_ext
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.zoo import attacks, layers
from tests.evaluations.diagnosis.zoo.callers import BY_NAME, CALLERS, Command, Python, blocks
from tests.evaluations.diagnosis.zoo.cases import LINF
from tests.evaluations.diagnosis.zoo.networks import convolutional, digits

# What has to be changed in the code alone, by the caller: ART and the command line put models into eval mode.
NOTHING = {
    "in place": ("module", "foolbox", "art", "command"),
    "dropout on": ("art", "command"),
    "batch statistics": ("art", "command"),
    "softmax outputs": ("command",),
    "random resize": ("command",),
    "noise": ("command",),
    # Of the samples that it has there, it solves none at once.
    "stops for the batch": ("command",),
    "raises before it starts": ("module", "foolbox", "art", "command"),
    "ten classes for granted": ("module", "foolbox", "art", "command"),
    "step divided by the batch": ("module", "foolbox", "art"),
    "ends by itself, with small steps": ("module", "foolbox", "art"),
    "steps that fade": ("module", "foolbox", "art"),
}
QUICK = (
    *(("rounding", caller) for caller in (*CALLERS, "command")),
    ("too few steps", "art"),
    ("too few steps", "command"),
    ("softmax outputs", "foolbox"),
    ("last instead of best", "module"),
)


def caller_of(name, caller, folder):
    fault = BY_NAME[name]
    return Command(fault, folder) if caller == "command" else Python(fault, caller)


def accuracy(asks):
    """Robust accuracy; None where the model is refused or the attack raises."""
    try:
        return asks.accuracy()
    except (robust_ext.ModelError, robust_ext.AttackError):
        return None


def pairs():
    """Every fault with a module, and every third by each of the others."""
    every = [(name, "module") for name in BY_NAME]
    every += [(name, caller) for k, caller in enumerate((*CALLERS, "command")) for name in [*BY_NAME][k % 3 :: 3] if k]
    return [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive)
        for pair in dict.fromkeys([*QUICK, *every])
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "caller"), pairs())
def test_every_remedy_runs_as_printed_and_finds_no_less(name, caller, tmp_path):
    asks = caller_of(name, caller, tmp_path)
    printed = blocks(asks.diagnosis())
    assert bool(printed) != (caller in NOTHING.get(name, ()))
    assert caller == "command" or not any("--" in block for block in printed)
    before = accuracy(asks) if printed else None
    for text in printed:
        asks = caller_of(name, caller, tmp_path)
        asks.paste(text)
        after = accuracy(asks)
        assert after is not None, text
        # A sample more or less is chance.
        assert before is None or after <= before + 1 / 12 + 1e-9, text


ROUNDING, NOISE = partial(convolutional, quantise=layers.Rounding()), partial(convolutional, noise=layers.Noise())
AVERAGED = "robust_ext:AdaptedAttack(attack='robust_ext:APGD(steps=5)', eot=8)"


@pytest.mark.parametrize(
    ("model", "attack"),
    [
        # No gradients are taken.
        (ROUNDING, "robust_ext:RandomSearch(points=20)"),
        (ROUNDING, "foolbox:LinearSearchBlendedUniformNoiseAttack(steps=20)"),
        (NOISE, "robust_ext:Square(queries=20)"),
        # They are averaged over draws already.
        (NOISE, AVERAGED),
        (NOISE, "torchattacks:EOTPGD(steps=5)"),
    ],
)
def test_what_cannot_help_is_not_proposed(model, attack):
    found = robust_ext.diagnose(model().eval(), attack, *digits(12), LINF, planted=0).findings
    proposed = [remedy for finding in found for remedy in finding.remedies]
    views = [view for remedy in proposed for view in (str(remedy.view), str(remedy.attack), remedy.paste)]
    assert not any(word in view for view in views for word in ("bpda", "straight_through", "eot=", "noise"))


@pytest.mark.parametrize("name", ["rounding", "no_grad"])
@pytest.mark.parametrize("caller", ["foolbox", "art"])
def test_attacks_of_the_library_itself_take_the_model_that_is_pasted(name, caller):
    asks = Python(BY_NAME[name], caller)
    (text,) = blocks(asks.diagnosis())[:1]
    asks.paste(text)
    model, _, inputs, labels, ball = asks.given
    if caller == "foolbox":
        attack = foolbox.attacks.LinfPGD(rel_stepsize=0.1)
        found = attack(model, inputs, labels, epsilons=ball.epsilon)[2]
    else:
        evasion = pytest.importorskip("art.attacks.evasion")
        attack = evasion.ProjectedGradientDescent(model, eps=ball.epsilon, eps_step=0.01, max_iter=40, verbose=False)
        found = torch.from_numpy(model.predict(attack.generate(inputs.numpy())).argmax(1)) != labels
    assert int(found.sum()) >= len(labels) // 3


def rounded(x):
    return (x * 15).round() / 15


@pytest.mark.parametrize(
    "attack",
    [
        "robust_ext:APGD(steps=10)",
        "robust_ext:AdaptedAttack(attack='robust_ext:APGD(steps=10)', gradient_mode='plain')",
        attacks.pgd,
        # All that is planned: the caller has no name for any of it.
        pytest.param(None, marks=pytest.mark.exhaustive),
    ],
)
def test_attacks_on_a_defense_at_test_time_get_through_it(attack):
    inputs, labels = digits(12)

    def left(attack):
        return robust_ext.evaluate_defense(rounded, attack, inputs, labels, LINF, classifier=digits_network())

    def worst(result):
        return result.content["defended"]["worst_case"]["robust_accuracy"]

    result, names = left(attack), {} if attack is None else {"attack": attack}
    pasted = [remedy["paste"] for finding in result.content["findings"] for remedy in finding["remedies"]]
    assert any(pasted)
    for text in filter(None, pasted):
        exec(text, names)  # noqa: S102 -- as printed
        assert worst(left(names["attack"])) <= (0.5 if attack is None else worst(result) - 0.3)
