"""Remedies as they are printed: pasted by the caller that they were printed for, they run and find no less.

Callers are Python with a module, a Foolbox model or an ART classifier, and the command line.
"""

import shlex
import tempfile
from collections.abc import Callable
from functools import partial

import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import nn
from torch.ao import quantization as ao
from typer.testing import CliRunner

import robust_ext
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.cli.app import app
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.registry.attack import as_attack
from tests.evaluations.diagnosis.zoo import attacks, layers
from tests.evaluations.diagnosis.zoo.cases import FAULTS, FOOLBOX, LINF, Fault
from tests.evaluations.diagnosis.zoo.networks import convolutional, digits
from tests.evaluations.diagnosis.zoo.running import samples


def quantised(*, faulty, static=False):
    """The demo's network, of which the linear layers or all layers are in integers."""
    network = nn.Sequential(ao.QuantStub(), digits_network(), ao.DeQuantStub()).eval()
    if not faulty:
        return network
    if not static:
        return ao.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)
    network.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    prepared = ao.prepare(network)
    prepared(digits()[0])
    return ao.convert(prepared)


class Trees(nn.Module):
    """A forest of scikit-learn, through numpy."""

    def __init__(self, *, faulty=True):
        super().__init__()
        images, classes = load_dataset("digits", split="train").take(range(400))
        self.forest = RandomForestClassifier(20, random_state=0).fit(images.flatten(1).numpy(), classes)
        self.eval()

    def forward(self, x):
        return torch.from_numpy(self.forest.predict_proba(x.detach().flatten(1).numpy())).float().add(1e-3).log()


INTEGERS = (
    Fault(name="int8", code="cut_gradient", model=quantised, attack=FOOLBOX),
    Fault(name="int8, static", code="cut_gradient", model=partial(quantised, static=True), attack=attacks.pgd),
    Fault(name="trees", code="cut_gradient", model=Trees, attack=FOOLBOX),
)
BY_NAME = {fault.name: fault for fault in (*FAULTS, *INTEGERS) if not fault.published}
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
}
SHORT = {"planted": 0, "references": False}
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
    ("int8", "command"),
)


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


CALLERS: dict[str, Callable] = {"module": lambda model, attack: (model, attack), "foolbox": of_foolbox, "art": of_art}


class Python:
    """A caller with names of its own, in which it pastes."""

    def __init__(self, fault, caller):
        (faulty, healthy), (attack, _) = fault.models(), fault.attacks()
        model, attack = CALLERS[caller](faulty, attack)
        inputs, labels = (part.clone() for part in samples(fault))
        self.names = {"model": model, "attack": attack, "static_model": healthy, "float_model": healthy}
        self.names |= {"inputs": inputs, "labels": labels, "threat_model": fault.threat_model}

    @property
    def given(self):
        return [self.names[name] for name in ("model", "attack", "inputs", "labels", "threat_model")]

    def diagnosis(self):
        return str(robust_ext.diagnose(*self.given, **SHORT))

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
        name = repr(fault.name)
        (folder / "net.py").write_text(
            f"from {__name__} import BY_NAME\n"
            f"fault = BY_NAME[{name}]\n"
            "model, float_model = fault.models()\n"
            "attack = fault.attacks()[0]\n"
        )
        text = attack if isinstance(attack, str) else f"{folder / 'net.py'}:attack"
        epsilon, norm = fault.threat_model.epsilon, fault.threat_model.norm
        self.options = [f"--model={folder / 'net.py'}:model", "--data=digits", f"--eps={epsilon}", f"--norm={norm}"]
        self.options += ["--samples=12", "--no-progress", f"--attack={text}"]

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
        (Trees, "robust_ext:Square(queries=20)"),
        (Trees, FOOLBOX),
        (Trees, attacks.pgd),
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


def weak_arm(norm, epsilon):
    return f"{norm}:{epsilon}=foolbox:{norm.capitalize()}PGD(steps=5, rel_stepsize=0.02)"


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 1.0), ("linf", 0.0625)])
def test_an_arm_is_mended_by_an_arm(norm, epsilon, tmp_path):
    """A suite has no option for an attack alone; in Python an arm has a norm and a budget of its own."""
    (tmp_path / "det.py").write_text("def spread(x):\n    return x.flatten(1).std(1)\n")
    options = ["mead", "--model=digits", "--data=digits", "--samples=12", f"--detector={tmp_path / 'det.py'}:spread"]
    options += ["--no-progress", "--resamples=0", f"--arm={weak_arm(norm, epsilon)}"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    line = next(line.strip() for line in done.output.splitlines() if line.startswith("    --arm"))
    again = CliRunner().invoke(app, [*options, *shlex.split(line), f"--out={tmp_path / 'out'}"])
    assert again.exit_code == 0, again.output
    weak, mended = robust_ext.load_result(tmp_path / "out").content["arms"]
    assert mended["successes"] > weak["successes"]
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
