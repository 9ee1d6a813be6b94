"""Every option of every command reaches the function behind it, under its own name and with the value it was given."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from robust_ext import TopK
from robust_ext.cli import app as cli
from robust_ext.cli.mead import MeadOptions, _sizes
from robust_ext.cli.options import option_name
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared, setting_types
from robust_ext.core.threat import ThreatModel
from robust_ext.demo.network import digits_network
from robust_ext.engine.context import current_context
from robust_ext.engine.executors import cores, workers_of
from robust_ext.engine.isolation import CAN_ISOLATE
from robust_ext.evaluations.adaptive import AdaptiveSettings
from robust_ext.evaluations.binarization import BinarizationSettings
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.evaluate import EvaluateSettings
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings
from robust_ext.models.readouts import Readout

EPS, TWO = ("--eps", "8/255"), ("--eps", "0.2,8/255")
FEW = ("--train-samples", "50", "--calibration-samples", "40", "--samples", "8", "--no-progress")
# Where the function behind a command is, its settings, and what the command needs beside a model and data.
COMMANDS = {
    "binarization": ("evaluations", "binarization_test", BinarizationSettings, ("--attack", "a:b", *EPS)),
    "diagnose": ("evaluations", "diagnose", DiagnosisSettings, ("--attack", "a:b", *EPS)),
    "evaluate": ("evaluations", "evaluate", EvaluateSettings, EPS),
    "mead": ("mead", "mead", MeadSettings, ("--detector", "{}:Unsure", *FEW)),
    "robust-accuracy": ("evaluations", "robust_accuracy", RobustAccuracySettings, ("--attack", "a:b", *TWO)),
    "test-time": ("evaluations", "evaluate_defense", AdaptiveSettings, ("--defense", "hd", *EPS)),
}


class Result(str):
    findings = ()


def other_value(kind, info, default):
    if kind is bool:
        return not default, []
    if info.choices is not None and kind == tuple[str, ...]:
        return info.choices[:2], list(info.choices[:2])
    if kind == tuple[float, ...]:
        return (1.0, 1.5, 3.0), ["1,3/2", "3"]
    upper = info.maximum if info.maximum is not None else info.below
    known = {str | None: "mine", int | None: 3, float | None: 3, str | Readout: "max-margin()", float | str: 0.25}
    if info.choices is not None and kind is str:
        value = next(choice for choice in info.choices if choice != default)
    elif kind is float:
        value = (default + upper) / 2 if upper is not None else default + 1.5
    else:
        value = known.get(kind) or (7 if isinstance(default, str) else default + 3)
    return value, [str(value)]


@pytest.fixture
def invoke(monkeypatch, files):
    def run(command, *arguments):
        module, function, _, own = COMMANDS[command]
        calls = []

        def evaluation(*positional, **keywords):
            calls.append(SimpleNamespace(positional=positional, context=current_context(), **keywords))
            return Result("the result")

        monkeypatch.setattr(importlib.import_module(f"robust_ext.cli.{module}"), function, evaluation)
        own = [word.format(files / "mine.py") for word in own]
        done = CliRunner().invoke(cli.app, [command, "--model", "digits", "--data", "digits", *own, *arguments])
        if done.exception is not None:
            raise done.exception
        (call,) = calls
        call.output = done.stdout
        return call

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_reaches_the_evaluation(command, invoke):
    cls = COMMANDS[command][2]
    kinds = setting_types(cls)
    expected, defaults, arguments = {}, {}, []
    for name, info in declared(cls).items():
        if info.names.get("cli", "") is None:
            continue
        # A default that the command has of its own.
        own = (command, name) == ("binarization", "sequential")
        defaults[name] = own or cls.__dataclass_fields__[name].default
        expected[name], words = other_value(kinds[name], info, defaults[name])
        option = option_name(name, info)
        arguments += [part for word in words for part in (option, word)]
        if not words:
            arguments.append(option if expected[name] else option.replace("--", "--no-"))
    for given, values in ((arguments, expected), ((), defaults)):
        call = vars(invoke(command, *given))
        assert {name: call[name] for name in values} == values


@pytest.mark.parametrize("command", COMMANDS)
def test_model_and_data_options(command, invoke, files):
    call = invoke(command)
    place = 1 if command == "evaluate" else 2
    inputs, origin = call.positional[place], call.context.origin
    assert len(inputs) == {"mead": 8, "robust-accuracy": 100, "diagnose": 32, "test-time": 64}.get(command, 128)
    assert (origin["model"], origin["data"]) == ("digits", "digits-test, order random")
    assert (float(inputs.min()), call.out, call.output) == (0.0, None, "the result\n")
    model = ["--model", f"{files / 'mine.py'}:make", "--weights", str(files / "w.safetensors"), "--device", "cpu"]
    data = ["--bounds=-1,1", "--data-root", str(files), "--samples", "5", "--order", "first", "--data-split"]
    # The commands that fit detectors take the train split for that.
    split = "test" if command == "mead" else "train"
    call = invoke(command, *model, *data, split, "--out", str(files / "run"), "--no-progress")
    weights = digits_network().state_dict()
    model = call.classifier if command == "test-time" else call.positional[0]
    assert all(torch.equal(value, weights[key] + 1) for key, value in model.state_dict().items())
    assert (call.sample_ids, float(call.positional[place].min())) == ([0, 1, 2, 3, 4], -1.0)
    assert call.context.origin["data"] == f"digits-{split}, order first"
    assert call.context.origin["model"].endswith("w.safetensors")
    assert (call.out, call.progress) == (files / "run", False)
    # What results name as the next command.
    assert call.context.command[0] == command
    assert {f"--out={files / 'run'}", "--no-progress", "--order=first"} <= set(call.context.command)
    assert "report.html hold the details." in call.output


def test_options_of_binarization_and_of_a_diagnosis(invoke):
    assert invoke("binarization").calibrate_on == 0
    own = ["--attack", "c:d", "--norm", "l2", "--layer", "fc", "--exposure", "reject", "--detector", "x.py:y"]
    sizes = ["--detector-fpr", "0.2", "--detector-samples", "30", "--calibrate", "--calibration-samples", "9"]
    call, l2 = invoke("binarization", *own, *sizes), ThreatModel(norm="l2", epsilon=8 / 255)
    assert (call.positional[1], call.positional[3]) == (["a:b", "c:d"], l2)
    assert (call.layer, call.exposure, call.detector, call.detector_fpr) == ("fc", "reject", "x.py:y", 0.2)
    assert (len(call.detector_data), call.calibrate_on, call.context.origin["detector"]) == (30, 9, "x.py:y")
    call = invoke("diagnose")
    assert (call.positional[1], call.try_remedies) == (["a:b"], False)
    call = invoke("diagnose", "--attack", "foolbox:FGSM()", "--norm", "l2", "--try-remedies", "--eot", "8")
    assert list(call.positional[1]) == ["a:b through EoT 8", "foolbox:FGSM() through EoT 8"]
    assert (call.positional[4], call.try_remedies) == (l2, True)


def test_options_of_robust_accuracy_and_test_time(invoke, files):
    call = invoke("robust-accuracy", "--norm", "l1", "--attack", "mine=c:d(e=1)")
    assert call.positional[1] == {"a:b": "a:b", "mine": "c:d(e=1)"}
    assert (call.positional[4], call.epsilons) == (ThreatModel(norm="l1", epsilon=0.2), (8 / 255, 0.2))
    surrogate = f"digits@{files / 'w.safetensors'}"
    call = invoke("test-time", "--norm", "l2", "--defense-weights", "d.safetensors", "--surrogate", surrogate)
    assert (call.positional[0], call.positional[4]) == ("hd", ThreatModel(norm="l2", epsilon=8 / 255))
    assert (call.defense_weights, list(call.surrogates), call.negatives) == ("d.safetensors", [surrogate], None)
    assert call.context.origin["defense"] == "hd, weights d.safetensors"
    assert len(invoke("test-time", "--one-image").negatives) > 15


def test_options_of_evaluate_and_criteria(invoke):
    for command in ("robust-accuracy", "evaluate", "test-time"):
        assert invoke(command, "--top", "2").criterion == TopK(2)
    call = invoke("evaluate", "--defense", "hd", "--detector", "x.py:y", "--detector-samples", "30")
    assert (call.defense, call.detector, len(call.detector_data)) == ("hd", "x.py:y", 30)


def pairs(arms):
    return [(arm.norm, arm.epsilon) for arm in arms]


def test_options_of_mead(invoke, monkeypatch):
    """Budgets take the place of those that suites have in their norm, and are those of arms without any."""
    made = {}

    def find_detectors(names, module, clean, labels, **keywords):
        made.update(names=names, clean=clean, **keywords)
        return {"a": None}

    monkeypatch.setattr("robust_ext.cli.mead.find_detectors", find_detectors)
    call = invoke("mead")
    assert (call.positional[1], call.allow_code) == (["quick"], False)
    attacks = ["--allow-code", "--suite", "white-box", "--arm", "linf:0.1,0.2=robust_ext:APGD()"]
    training = ["--train-data", "digits", "--preset", "mnist", "--adversarial-samples", "11"]
    call = invoke("mead", "--detector", "lid", *attacks, *training)
    suite, *arms = call.positional[1]
    assert (suite, pairs(arms)) == ("white-box", [("linf", 0.1), ("linf", 0.2)])
    assert (len(call.detector_data), call.allow_code) == (40, True)
    assert (made["names"][-1], len(made["clean"]), made["attacked"], made["preset"]) == ("lid", 50, 11, "mnist")
    assert call.context.origin["training_data"] == "digits-train, 50 samples, and 40 to calibrate"
    arms = invoke("mead", "--eps", "2/255,8/255").positional[1]
    assert {*pairs(arms)} == {("linf", 2 / 255), ("linf", 8 / 255)}
    assert {"PGD-ACE", "FGSM-ACE", "Random"} <= {arm.short for arm in arms}
    assert len({arm.name for arm in arms}) == len(arms) == 2 * len({arm.short for arm in arms})
    texts = ["--arm", "linf:0.1=robust_ext:APGD()", "--arm", "robust_ext:APGD(steps=5)"]
    assert pairs(invoke("mead", "--norm", "l2", "--eps", "1", *texts).positional[1]) == [("linf", 0.1), ("l2", 1.0)]
    (arm,) = invoke("mead", "--bpda", "0", "--eot", "3", *texts[:2]).positional[1]
    adapted = arm.resolved
    assert (arm.epsilon, adapted.attack.name, adapted.bpda, adapted.eot) == (0.1, "robust_ext:APGD()", "0", 3)
    with pytest.raises(InvalidArgumentError, match="--norm: got l1, expected a norm that arms of quick have: l2, linf"):
        invoke("mead", "--norm", "l1", "--eps", "1")


def test_mead_takes_the_training_data_that_there_is():
    """By default it used to refuse training sets of 5,000 images."""
    sized, own = type("Sized", (list,), {"name": "few"}), {"detector": ("nss",)}
    sizes = {count: _sizes(MeadOptions(**own), sized(range(count))) for count in (60000, 5000, 900, 2)}
    assert sizes == {60000: (5000, 1000), 5000: (4000, 1000), 900: (600, 300), 2: (1, 1)}
    assert _sizes(MeadOptions(**own, calibration_samples=10), sized(range(5000))) == (4990, 10)
    with pytest.raises(InvalidArgumentError, match="got 4500 and 1000 to calibrate, expected at most 5000 samples of"):
        _sizes(MeadOptions(**own, train_samples=4500), sized(range(5000)))


@pytest.mark.parametrize("command", COMMANDS)
def test_workers(command, invoke, files):
    """Where nothing is stated, there are none: the work is done in this process."""
    call = invoke(command, "--attack-timeout", "9", "--repair", "--out", str(files / "run"))
    assert (call.executor, call.devices, call.context.repair) == (None, None, True)
    assert (call.isolate, call.attack_timeout) == (CAN_ISOLATE, 9.0)
    call = invoke(command, "--jobs", "1", "--in-process")
    assert (call.executor, call.isolate) == (None, False)
    for words, workers, devices in (
        ("--jobs 2", 2, None),
        ("--executor local", cores(), None),
        ("--executor local:3", 3, None),
        ("--executor local --jobs 4", 4, None),
        ("--devices cpu,cpu", 2, ["cpu", "cpu"]),
    ):
        call = invoke(command, *words.split())
        assert (workers_of(call.executor()), call.devices) == (workers, devices)
    for words, message in (
        (["--repair"], "--repair: got no run folder"),
        (["--executor", "cluster"], "executor: got cluster, expected local, local:N, dask"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            invoke(command, *words)
