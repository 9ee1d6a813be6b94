"""Known faults are named, their healthy twins are not, and remedies fix what they are for, as they are printed.

What a fault does is measured too: a fault that does no harm would be none.
"""

import shlex
import tempfile
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import robust_ext
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.cli.app import app
from robust_ext.demo.network import digits_network
from robust_ext.registry.attack import as_attack
from tests.evaluations.diagnosis import held_out
from tests.evaluations.diagnosis.zoo import attacks, layers, running
from tests.evaluations.diagnosis.zoo.cases import FAULTS, LINF
from tests.evaluations.diagnosis.zoo.networks import available, convolutional, digits

BY_NAME = {fault.name: fault for fault in (*FAULTS, *held_out.FAULTS)}
# Nothing that is proposed for these is enough; see docs/diagnosis.md.
NOT_FIXED = ("k-winners", "k-winners of channels")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "noise" else pytest.mark.exhaustive) for name in BY_NAME]
)
def test_a_fault_does_harm_is_named_first_and_can_be_fixed(name):
    """And its twin is healthy; by what is proposed, and by what was found by hand without the diagnosis."""
    fault = BY_NAME[name]
    if fault.published and not available():
        pytest.skip("no ResNet-20 or no CIFAR-10 on this machine")
    ill, healthy = running.diagnosed(fault, try_remedies=name != "noise")
    measured = running.harm(fault, (ill, healthy))
    if fault.harm == "score":
        assert measured["fault"] < 0.5
        assert measured["twin"] >= 0.95
    else:
        # The twin predicts the same, so that what is found on it is there.
        assert measured["fault"] >= measured["twin"] + 0.3
    assert running.first_cause(ill) == (fault.code, fault.layer)
    assert [(one.code, one.layer) for one in healthy.findings if one.weight != "low"] == []
    assert not running.worsened(ill)
    assert running.falsely_confirmed(ill) == []
    if name in NOT_FIXED or fault.harm != "score" or fault in held_out.FAULTS:
        return
    trial = running.best_trial(ill)
    # Where code has to be changed, there is nothing to run.
    assert trial is not None or fault.remedy is None
    assert trial is None or (trial[1] < 0.5 and trial[2] >= 0.95)
    # That remedy may be the one that was found by hand.
    assert fault.remedy is None or trial[0] == fault.remedy or running.fixed_by_hand(fault) >= 0.95


def blocks(text):
    """The lines to paste under each remedy that is printed."""
    found = []
    for line in text.splitlines():
        if line.startswith("  Remedy: "):
            found.append([])
        elif found and line.startswith("      "):
            found[-1].append(line[6:])
    return ["\n".join(block) for block in found if any(not line.startswith("#") for line in block)]


def of_foolbox(model, attack):
    found = as_attack(attack) if isinstance(attack, str) else None
    return foolbox.PyTorchModel(model, bounds=(0, 1)), getattr(found, "attack", attack)


def of_art(model, attack):
    art = pytest.importorskip("art.estimators.classification")
    shape = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0, 1)}
    classifier = art.PyTorchClassifier(model, loss=torch.nn.CrossEntropyLoss(), **shape)
    if isinstance(attack, str) and attack.startswith("art:"):
        found = as_attack(attack)
        attack = found.made_of(classifier, **found.settings)
    return classifier, attack


class Python:
    """A caller with names of its own, in which it pastes."""

    def __init__(self, fault, caller):
        (faulty, healthy), (attack, _) = fault.models(), fault.attacks()
        model, attack = {"foolbox": of_foolbox, "art": of_art}.get(caller, lambda *both: both)(faulty, attack)
        inputs, labels = (part.clone() for part in running.samples(fault))
        self.names = {"model": model, "attack": attack, "static_model": healthy, "float_model": healthy}
        self.names |= {"inputs": inputs, "labels": labels, "threat_model": fault.threat_model}

    @property
    def given(self):
        return [self.names[name] for name in ("model", "attack", "inputs", "labels", "threat_model")]

    def diagnosis(self):
        return str(robust_ext.diagnose(*self.given, planted=0, references=False))

    def accuracy(self):
        if "result" in self.names:
            return self.names["result"].content["defended"]["worst_case"]["robust_accuracy"]
        return robust_ext.robust_accuracy(*self.given).robust_accuracy(self.names["threat_model"].epsilon)

    def paste(self, text):
        exec(text, self.names)  # noqa: S102 -- as printed


class Command:
    """A caller at a terminal, whose model and attack lie in a file."""

    def __init__(self, fault, folder):
        self.folder, self.more, (attack, _) = folder, [], fault.attacks()
        file = folder / "net.py"
        file.write_text(
            f"from {__name__} import BY_NAME\n"
            f"fault = BY_NAME[{fault.name!r}]\n"
            "model, float_model = fault.models()\n"
            "attack = fault.attacks()[0]\n"
        )
        ball, text = fault.threat_model, attack if isinstance(attack, str) else f"{file}:attack"
        self.options = [f"--model={file}:model", "--data=digits", f"--eps={ball.epsilon}", f"--norm={ball.norm}"]
        # One of them with its attack in a process of its own, which takes seconds to start.
        self.options += ["--samples=12", "--no-progress", *["--in-process"] * (fault.name != "rounding")]
        self.options.append(f"--attack={text}")

    def run(self, command, *options):
        done = CliRunner().invoke(app, [command, *self.options, *options, *self.more])
        if isinstance(done.exception, robust_ext.RobustExtError):
            raise done.exception
        assert done.exit_code in (0, 3), done.output
        return done.output

    def diagnosis(self):
        return self.run("diagnose", "--planted=0", "--no-references")

    def accuracy(self):
        out = tempfile.mkdtemp(dir=self.folder)
        self.run("robust-accuracy", f"--out={out}")
        return min(row["robust_accuracy"] for row in robust_ext.load_result(out).content["worst_case"])

    def paste(self, text):
        words = shlex.split(text, comments=True)
        if words[0] != "robust-ext":
            self.more = words
            return
        # A command of its own, of which options of this evaluation alone are left out.
        self.options = [one for one in words[2:] if one not in ("--planted=0", "--no-references")]


CALLERS = ("module", "foolbox", "art", "command")
# What has to be changed in the code alone, by the caller: ART and the command line put models into eval mode.
NOTHING = {
    "in place": CALLERS,
    "dropout on": ("art", "command"),
    "batch statistics": ("art", "command"),
    "softmax outputs": ("command",),
    "random resize": ("command",),
    "noise": ("command",),
    # Of the samples that it has there, it solves none at once.
    "stops for the batch": ("command",),
    "raises before it starts": CALLERS,
    "ten classes for granted": CALLERS,
    "step divided by the batch": CALLERS[:3],
    "ends by itself, with small steps": CALLERS[:3],
    "steps that fade": CALLERS[:3],
}
QUICK = [("rounding", "art"), ("rounding", "command"), ("too few steps", "command"), ("softmax outputs", "foolbox")]


def pairs():
    """Every fault with a module, and every third by each of the others."""
    names = [fault.name for fault in FAULTS if not fault.published]
    every = [(name, caller) for k, caller in enumerate(CALLERS) for name in (names[k % 3 :: 3] if k else names)]
    return [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive)
        for pair in dict.fromkeys([*QUICK, *every])
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "caller"), pairs())
def test_every_remedy_runs_as_printed_and_finds_no_less(name, caller, tmp_path):
    def begin():
        return Command(BY_NAME[name], tmp_path) if caller == "command" else Python(BY_NAME[name], caller)

    asks = begin()
    printed = blocks(asks.diagnosis())
    assert bool(printed) != (caller in NOTHING.get(name, ()))
    assert caller == "command" or not any("--" in block for block in printed)
    try:
        before = asks.accuracy()
    except (robust_ext.ModelError, robust_ext.AttackError):
        # The model is refused, or the attack raises.
        before = 1.0
    for text in printed:
        asks = begin()
        asks.paste(text)
        # A sample more or less is chance.
        assert asks.accuracy() <= before + 1 / 12 + 1e-9, text


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

    def attacked(attack):
        defense = layers.Rounding()
        result = robust_ext.evaluate_defense(defense, attack, inputs, labels, LINF, classifier=digits_network())
        return result, result.content["defended"]["worst_case"]["robust_accuracy"]

    (result, before), names = attacked(attack), {} if attack is None else {"attack": attack}
    pasted = [remedy["paste"] for finding in result.content["findings"] for remedy in finding["remedies"]]
    assert any(pasted)
    for text in filter(None, pasted):
        exec(text, names)  # noqa: S102 -- as printed
        assert attacked(names["attack"])[1] <= (0.5 if attack is None else before - 0.3)
