"""Callers of the diagnosis who paste what it prints: in Python with several kinds of models, and at a terminal."""

import shlex
import tempfile
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

import robust_ext
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.cli.app import app
from robust_ext.registry.attack import as_attack
from tests.evaluations.diagnosis.zoo.cases import FAULTS
from tests.evaluations.diagnosis.zoo.running import samples

SHORT = {"planted": 0, "references": False}


BY_NAME = {fault.name: fault for fault in FAULTS if not fault.published}


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
