"""Remedies as they are printed: pasted by the caller that they were printed for, they run and find no less.

Callers are Python with a module, a Foolbox model or an ART classifier, and the command line.
"""

import shlex
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import robust_ext
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.attacks.transfer import Transfer
from robust_ext.cli.app import app
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.zoo import attacks, layers
from tests.evaluations.diagnosis.zoo.callers import (
    BY_NAME,
    CALLERS,
    SHORT,
    Command,
    Python,
    Trees,
    blocks,
    of_art,
    of_foolbox,
)
from tests.evaluations.diagnosis.zoo.cases import FOOLBOX, LINF
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
    ("rounding", "module"),
    ("rounding", "foolbox"),
    ("rounding", "art"),
    ("rounding", "command"),
    ("steps too small", "foolbox"),
    ("too few steps", "art"),
    ("too few steps", "command"),
    ("softmax outputs", "foolbox"),
    ("last instead of best", "module"),
    ("noise", "module"),
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
    every = [(name, caller) for name in BY_NAME for caller in (*CALLERS, "command")]
    # Its layers cannot be sent to an attack's process.
    every.remove(("int8, static", "command"))
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive) for pair in every]


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
        (ROUNDING, "robust_ext:RayS(queries=60)"),
        (ROUNDING, "foolbox:LinearSearchBlendedUniformNoiseAttack(steps=20)"),
        (NOISE, "robust_ext:RandomSearch(points=20)"),
        (NOISE, "robust_ext:Square(queries=20)"),
        # They are averaged over draws already.
        (NOISE, AVERAGED),
        (NOISE, "torchattacks:EOTPGD(steps=5)"),
        # There are none to be had.
        pytest.param(Trees, "robust_ext:Square(queries=20)", marks=pytest.mark.exhaustive),
        pytest.param(Trees, FOOLBOX, marks=pytest.mark.exhaustive),
        pytest.param(Trees, attacks.pgd, marks=pytest.mark.exhaustive),
    ],
)
def test_what_cannot_help_is_not_proposed(model, attack):
    found = robust_ext.diagnose(model().eval(), attack, *digits(12), LINF, planted=0).findings
    proposed = [remedy for finding in found for remedy in finding.remedies]
    views = [view for remedy in proposed for view in (str(remedy.view), str(remedy.attack), remedy.paste)]
    assert not any(word in view for view in views for word in ("bpda", "straight_through", "eot=", "noise"))


@pytest.mark.parametrize("kind", [lambda model: model, of_foolbox, of_art])
def test_bpda_and_eot_take_what_evaluations_take_and_layers_as_findings_name_them(kind):
    inputs, labels = digits(12)
    model = kind(ROUNDING()) if kind not in CALLERS.values() else kind(ROUNDING(), None)[0]
    layer = robust_ext.diagnose(model, FOOLBOX, inputs, labels, LINF, **SHORT).likely.layer
    point = inputs.clone().requires_grad_()
    shown = robust_ext.EoT(robust_ext.BPDA(model, layer=layer), draws=2)
    (gradient,) = torch.autograd.grad(shown(point).square().sum(), point)
    assert bool((gradient != 0).flatten(1).any(1).all())
    assert torch.equal(robust_ext.EoT(model, draws=1)(inputs), robust_ext.as_module(model).module(inputs))


@pytest.mark.parametrize("name", ["rounding", "argmax and one-hot", "no_grad", "zero backward pass"])
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


def weak_arm(norm, epsilon):
    return f"{norm}:{epsilon}=foolbox:{norm.capitalize()}PGD(steps=5, rel_stepsize=0.02)"


@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [
        ("linf", 0.1),
        pytest.param("l2", 1.0, marks=pytest.mark.exhaustive),
        pytest.param("linf", 0.0625, marks=pytest.mark.exhaustive),
    ],
)
def test_an_arm_is_fixed_by_an_arm(norm, epsilon, tmp_path):
    """A suite has no option for an attack alone; in Python an arm has a norm and a budget of its own."""
    (tmp_path / "det.py").write_text("def spread(x):\n    return x.flatten(1).std(1)\n")
    options = ["mead", "--model=digits", "--data=digits", "--samples=12", f"--detector={tmp_path / 'det.py'}:spread"]
    options += ["--no-progress", "--resamples=0", f"--arm={weak_arm(norm, epsilon)}"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    line = next(line.strip() for line in done.output.splitlines() if line.startswith("    --arm"))
    again = CliRunner().invoke(app, [*options, *shlex.split(line), f"--out={tmp_path / 'out'}"])
    assert again.exit_code == 0, again.output
    weak, fixed = robust_ext.load_result(tmp_path / "out").content["arms"]
    assert fixed["successes"] > weak["successes"]
    inputs, labels = digits(12)
    arm = robust_ext.Arm(attack=weak_arm(norm, epsilon).partition("=")[2], norm=norm, epsilon=epsilon)
    given = {"detectors": lambda x: x.flatten(1).std(1), "resamples": 0}
    names = {"attack": arm}
    text = str(robust_ext.mead(digits_network(), arm, inputs, labels, LINF, **given))
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    exec("\n".join(line for line in lines if line.startswith(("import", "attack ="))), names)  # noqa: S102
    assert (names["attack"].norm, names["attack"].epsilon) == (norm, epsilon)
    robust_ext.mead(digits_network(), names["attack"], inputs, labels, LINF, **given)


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


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("attack", ["foolbox:LinfPGD(steps=40, rel_stepsize=0.1)", "transfer", "noise"])
def test_what_is_printed_next_runs(attack):
    """An attack that crafts on other networks is not sent to a binarization test, whose problems have two classes."""
    inputs, labels = digits(12)
    given = {
        "transfer": Transfer(surrogates={"float": digits_network()}),
        "noise": robust_ext.AdaptedAttack(attack=robust_ext.as_attack(FOOLBOX), noise=0.1, eot=2),
    }
    names = {"robust_ext": robust_ext, "model": digits_network(), "attack": given.get(attack, attack)}
    names |= {"inputs": inputs, "labels": labels, "threat_model": LINF}
    result = robust_ext.diagnose(names["model"], names["attack"], inputs, labels, LINF, planted=2, references=False)
    commands = [step["command"] for step in result.content["next"]]
    assert any("binarization" in one for one in commands) == (attack != "transfer")
    for text in commands:
        exec(text, names)  # noqa: S102 -- as printed
