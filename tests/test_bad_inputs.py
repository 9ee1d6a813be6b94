"""Bad inputs end in one clear error that names the argument, at every function, option and file."""

import contextlib
import io
import logging
import math
import os
import re
import shutil
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import robust_ext
from robust_ext import ThreatModel, as_attack
from robust_ext.cli import app as cli
from robust_ext.cli.evaluations import BinarizationOptions
from robust_ext.cli.loading import RunOptions
from robust_ext.cli.mead import MeadOptions
from robust_ext.cli.models import load_model
from robust_ext.cli.options import option_name
from robust_ext.core.errors import RobustExtError
from robust_ext.core.settings import declared, setting_types
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.adaptive import AdaptiveSettings
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.binarization import BinarizationSettings
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings
from robust_ext.registry.defense import as_defense

# The same examples each time: which of them have a meaning after all was looked at.
SEARCH = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
X = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
APGD = "robust_ext:APGD(steps=1)"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()


# Right ones, as attacks need not be run on samples that are misclassified unchanged.
Y = network()(X).argmax(1)


def fail(self):
    raise RuntimeError("nothing of the kind")


class Gives(nn.Module):
    """A model that returns one thing."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.eval()

    def forward(self, x):
        return self.made(x) if callable(self.made) else self.made


def one_of(*values):
    """Values that are wrong for anything, and some that are for an argument."""
    return st.one_of(JUNK, st.sampled_from(values))


Odd = type("Odd", (), dict.fromkeys(("__len__", "__iter__", "__float__", "__index__"), fail))
OBJECTS = (Odd(), object(), type, int, print, lambda: 3, ..., 1j, range(3), {1, 2}, (1, 2, 3), ("linf",), [[]])
ARRAYS = (np.zeros(0), np.zeros((2, 2)), np.float32("nan"), np.array(None), torch.zeros(0), torch.zeros(2, 2))
JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(10**30), -1), st.text(max_size=8), st.binary(max_size=4)),
    st.floats().filter(lambda x: not 0 < x < 1),
    st.lists(st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
    st.sampled_from([*OBJECTS, *ARRAYS, 10**30, -0.0, 1e300, "\x1b[31m", nn.Linear(2, 2), Exception("x")]),
)
INPUTS = one_of(
    *(X.long(), X.bool(), X * math.nan, X / 0, X + 2, X - 2, X[0, 0, 0], X[:0], X[:, :0], X.numpy().astype(int)),
    *(X.to(torch.complex64), X.unsqueeze(0), X.flatten(), torch.zeros(3, 1, 5, 5), X.to_sparse(), X.to("meta")),
)
LABELS = one_of(
    *(Y.float(), Y - 3, Y + 3, Y[:2], Y.view(3, 1), Y.bool(), Y.numpy() + 0.5, torch.ones(3, 3), Y.tolist()),
    *(Y.to("meta"), Y * 10**15),
)
OUTPUTS = (
    *(None, "x", torch.zeros(3, 1), torch.zeros(3, 3) * math.nan, X, lambda x: x, lambda x: x.flatten(1)[:1]),
    *(lambda x: x.flatten(1).softmax(1), lambda x: x.flatten(1).long()),
)
SEQUENCES = (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3)), (nn.Flatten(), nn.Linear(9, 3)))
MODELS = one_of(*map(Gives, OUTPUTS), *SEQUENCES, nn.Linear, nn.Linear(16, 3), nn.Module(), network().to("meta"))
CALLABLES = (lambda m, x, y: None, lambda m, x, y: x[:1], lambda m, x, y: x * 1j, lambda m, x, y: 1 / 0)
SPECS = ("robust_ext:Nothing()", "foolbox:LinfPGD(steps=0)", ":", "a:b", (int, {}), (int, 3))
ATTACKS = one_of(*SPECS, *CALLABLES, [APGD, APGD], {"a": 3}, {}, lambda m, x: x, lambda m, x, y, z: x)
DETECTORS = one_of(lambda x: x, lambda x: None, lambda x: 1 / 0, lambda x: x.flatten(1).mean(1) * math.nan, {}, "a:b")
DEFENSES = one_of(lambda x: x[:1], lambda x: 1 / 0, lambda x: None, "hd(steps=-1)", "aid", "x", "a:b")
IDS = one_of([0, 0, 1], [0, 1], [0, 1, -1], [0, 1, 1.5], "abc", {0: 1}, torch.zeros(3), np.zeros((3, 1), int))

COMMON = {"inputs": INPUTS, "sample_ids": IDS, "attacks": ATTACKS}
COMMON |= dict.fromkeys(("threat_model", "seed", "batch_size", "settings", "device"), JUNK)
LABELLED = {**COMMON, "labels": LABELS}
LINF = {"threat_model": ThreatModel(norm="linf", epsilon=0.1), "inputs": X, "attacks": APGD}
ATTACKED = {**LINF, "labels": Y, "model": network()}
TESTED = {**LINF, "inner_points": 5, "random_inner": 1, "random_corners": 1, "canaries": 0, "model": network()}
DETECTED = {**ATTACKED, "resamples": 0, "detectors": lambda x: x.flatten(1).std(1)}
DEFENDED = {**LINF, "defense": lambda x: x + 0, "draws": 1, "repeats": 1, "labels": Y, "classifier": network()}


def junk(names, **others):
    return {**dict.fromkeys(names.split(), JUNK), **others}


BINARIZED = junk("kappa gap boundary C threshold inner_points exposure layer", model=MODELS, detector=DETECTORS)
MEAD = junk("combine naturals", detectors=DETECTORS, detector_data=INPUTS, model=MODELS)
ADAPTIVE = junk("surrogates steps", defense=DEFENSES, classifier=MODELS)
# A function, arguments that are right, and what is drawn for arguments.
FUNCTIONS = [
    (robust_ext.binarization_test, TESTED, {**COMMON, **BINARIZED, "detector_data": INPUTS}),
    (robust_ext.robust_accuracy, ATTACKED, {**LABELLED, **junk("epsilons", model=MODELS)}),
    (robust_ext.mead, DETECTED, {**LABELLED, **MEAD}),
    (robust_ext.evaluate_defense, DEFENDED, {**LABELLED, **ADAPTIVE}),
    (ThreatModel, {"norm": "linf", "epsilon": 0.1}, junk("norm epsilon bounds")),
    (Arm, {"attack": APGD, "epsilon": 0.1}, junk("norm epsilon", attack=ATTACKS)),
    (as_attack, {}, {"obj": ATTACKS}),
    (as_defense, {"obj": "bit-depth", "classifier": network(), "inputs": X}, junk("bounds weights", obj=DEFENSES)),
    (load_suite, {"name": "quick"}, junk("name bounds")),
    (load_dataset, {"spec": "digits"}, junk("spec root split")),
]
FUNCTIONS = {function.__name__: (function, right, drawn) for function, right, drawn in FUNCTIONS}
# None leaves them out.
OPTIONAL = {"sample_ids", "settings", "detector", "detector_data", "layer", "epsilons", "surrogates", "weights", "root"}
OPTIONAL |= {"device"}


def is_budgets(values):
    return all(type(one) is int and one >= 0 for one in values) and any(values)


def is_right(name, argument, value):
    """Whether a value has a meaning after all; written without the project's own checks."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        return argument in OPTIONAL or (name, argument) in {("Arm", "norm"), ("evaluate_defense", "attacks")}
    if argument in ("attack", "obj") and name != "as_defense":
        return callable(value) and not isinstance(value, type)
    several = isinstance(value, (list, tuple))
    return {
        "bounds": lambda: several and len(value) == 2 and all(type(one) is int for one in value),
        # One for each entry of an input, too.
        "epsilon": lambda: 0 < value <= 1e20 if number else name == "ThreatModel" and several and is_budgets(value),
        "epsilons": lambda: (several or isinstance(value, set)) and 0 not in value and is_budgets(value),
        "sample_ids": lambda: (several or isinstance(value, range)) and sorted(value) == sorted({*value}) != [],
        "combine": lambda: 0 in value.shape if hasattr(value, "shape") else several and not value,
        "surrogates": lambda: isinstance(value, dict) and not value,
        "attacks": lambda: name == "evaluate_defense" and value == [None],
        "C": lambda: number and 0 < value <= 1e9,
        "root": lambda: value in (".", "/", ".."),
    }.get(argument, lambda: False)()


def error_of(function, *given, **named):
    """The text of the project's own error that a call ends in, None where it ends in none."""
    try:
        function(*given, **named)
    except RobustExtError as error:
        return str(error)
    return None


# What errors call an argument, where not by its name; attacks by their own.
NAMES = {"obj": "attack|defense|lambda|steps", "attack": "attack|arm", "spec": "spec|data|not found", "name": "suite"}
NAMES |= {"attacks": "attack|lambda|returned|raised|suite|arm", "defense": "defense|steps", "inner_points": "inner"}
NAMES |= {"detectors": "detector|lambda", "classifier": "classifier|model"}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("examples", [12, pytest.param(150, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_one_error_that_names_it(name, examples):
    function, right, drawn = FUNCTIONS[name]

    @settings(max_examples=examples, **SEARCH)
    @given(st.sampled_from(sorted(drawn)).flatmap(lambda one: st.tuples(st.just(one), drawn[one])))
    def check(case):
        argument, value = case
        error = error_of(function, **{**right, argument: value})
        if error is None:
            assert is_right(name, argument, value)
        else:
            assert re.search(NAMES.get(argument, argument), error), (argument, error)

    check()


CODE = """
import sys
import torch
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector

number, text, nothing, listed, ready = 3, "digits", None, [1, 2], digits_network()
def needs(depth): return digits_network()
def fails(): raise ValueError("\\x1b[31mno")
def quits(): sys.exit(0)
def endless_text(): return "mine.py:endless_text"
def score(x): return x.flatten(1).std(1)
def bad_score(x): return x
def nan_score(x): return x.flatten(1).mean(1) * float("nan")
def failing(*given): raise KeyError("\\x1b]0;x")
def gives_text(*given): return "x"
def two(model, x): return x
def short_attack(model, x, y): return x[:1]
def integer_attack(model, x, y): return x.long()
def short_purifier(x): return x[:1]

class Unfitted(Detector):
    def score_of(self, seen): raise RuntimeError("not fitted")

small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2)).eval()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Code, weights, data and files that are none of these, in the working folder."""
    path, before = tmp_path_factory.mktemp("bad"), Path.cwd()
    files = {"mine.py": CODE, "syntax.py": "def broken(:", "exits.py": "import sys; sys.exit(0)", "empty.py": ""}
    files |= {"raises.py": "raise KeyError('\x1b]0;x')", "in the way": "a file"}
    for name, text in files.items():
        (path / name).write_text(text)
    state = digits_network().state_dict()
    save_file(state, path / "good.safetensors")
    torch.save(state, path / "good.pt")
    torch.save([1, 2], path / "list.pt")
    torch.save({key: value * float("nan") for key, value in state.items()}, path / "nan.pt")
    save_file({"0.weight": torch.zeros(3)}, path / "other.safetensors")
    images, labels = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8)).astype(np.uint8), np.arange(12) % 10
    np.savez(path / "good.npz", images=images, labels=labels)
    for name in ("cifar-10-batches-bin", "pictures/a"):
        (path / name).mkdir(parents=True)
    rows = np.random.default_rng(1).integers(0, 256, (12, 3073)).astype(np.uint8)
    rows[:, 0] = labels
    for name in ("test_batch.bin", *(f"data_batch_{number}.bin" for number in range(1, 6))):
        (path / "cifar-10-batches-bin" / name).write_bytes(rows.tobytes())
    (path / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    (path / "loop").symlink_to("loop")
    os.chdir(path)
    yield path
    os.chdir(before)


RUN = {"--data": "digits", "--samples": "2", "--model": "digits", "--no-progress": None, "--in-process": None}
FEW = {"--inner-points": "10", "--random-inner": "2", "--random-corners": "2", "--canaries": "0", "--proven-rate": "0"}
FITTED = {"--train-samples": "4", "--calibration-samples": "25", "--adversarial-samples": "2", "--resamples": "2"}
ARM = {"--arm": "linf:0.1=robust_ext:ObjectivePGD(steps=1)", "--detector": "mine.py:score"}
OWN_ATTACK = {**RUN, "--eps": "0.1", "--attack": APGD}
DEFENSE = {**RUN, "--eps": "0.1", "--defense": "bit-depth", "--steps": "1", "--queries": "2", "--draws": "1"}
# Options of a command that works, and the classes that declare the numbers among all its options.
COMMANDS = {
    "robust-accuracy": (OWN_ATTACK, (RunOptions, RobustAccuracySettings)),
    "binarization": ({**OWN_ATTACK, **FEW}, (RunOptions, BinarizationOptions, BinarizationSettings)),
    "mead": ({**RUN, **FITTED, **ARM}, (RunOptions, MeadOptions, MeadSettings)),
    "test-time": (DEFENSE, (RunOptions, AdaptiveSettings)),
}
CONTROLS = ("\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\r\x1b[K", "\u202e", "\x00", "\udcff", "\x7f", "\b\b", "\u2028")
NUMBERED = """
nan inf -inf 1e400 -1 0 1e-400 0x10 1,5 1/0 -- None True -5 0.5 1.5 1e20 ten [1] {} 1;2 $(id) ../.. %s%n <b> [bold]x[/]
1e3 +3 0/1
"""
WORDS = (*NUMBERED.split(), "", " ", "9" * 400, "9" * 5000, "٣", "½", "😀", "a" * 3000, *CONTROLS)


class Terminal(io.StringIO):
    """What is written to a terminal; colours would be stripped from what goes elsewhere."""

    def isatty(self):
        return True


def invoke(arguments):
    """The status of the program, and what it writes to stdout and stderr."""
    out, err, root = Terminal(), Terminal(), logging.getLogger()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patched.setenv("TERM", "dumb")
        patched.setenv("NO_COLOR", "1")
        patched.setattr(sys, "argv", ["robust-ext", *arguments])
        patched.setattr(sys, "stdin", io.StringIO())
        patched.setattr(root, "handlers", root.handlers[:])
        patched.setattr(root, "level", root.level)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status = cli.main()
            except SystemExit as ended:
                status = ended.code
    return status, out.getvalue(), err.getvalue()


def refused(command, drop=(), more=(), names="", **changes):
    """Run a command with options changed: it ends with status 2, one line that names the option, and no result."""
    options = {**COMMANDS[command][0], **{f"--{key.replace('_', '-')}": value for key, value in changes.items()}}
    words = [name if value is None else f"{name}={value}" for name, value in options.items() if name not in drop]
    status, out, err = invoke([command, *words, *more])
    assert all(char.isprintable() or char in "\n\r\t" for char in out + err)
    assert status == 2, (status, out[-300:], err[-300:])
    assert "Traceback" not in err + out
    assert "error: unexpected" not in err
    assert re.search(names, err), (names, err[-600:])


def legal(word, info, real):
    """Whether the declared range has the number that a word stands for, by Python's own reading."""
    try:
        value = float(word) if real else int(word)
    except ValueError:
        return False
    low, high = (default if end is None else end for end, default in ((info.minimum, -math.inf), (info.maximum, 1e9)))
    inside = (info.above is None or value > info.above) and (info.below is None or value < info.below)
    return low <= value <= high and inside


def is_budget(word):
    """Whether a text is a number above 0, or a fraction of two."""
    above, _, below = word.partition("/")
    try:
        return float(above) / float(below or "1") > 0
    except (ValueError, ZeroDivisionError):
        return False


def wrong_numbers():
    """Cases of words for every numeric option that are no numbers in its range."""
    for command, (_, classes) in COMMANDS.items():
        for name, info, kind in [
            (*one, setting_types(cls)[one[0]]) for cls in classes for one in declared(cls).items()
        ]:
            kinds = {kind, *typing.get_args(kind)}
            plain = kinds & {int, float} and bool not in kinds and typing.get_origin(kind) is not tuple
            if plain and info.names.get("cli", "") is not None:
                option = option_name(name, info).strip("-")
                for word in WORDS:
                    if not legal(word, info, float in kinds):
                        yield command, {option: word, "names": option.replace("-", "[-_]")}


TEXTS = {
    "robust-accuracy": "model weights bounds data data_root data_split order device executor devices attack",
    "binarization": "norm boundary readout layer exposure detector kappa_convention",
    "mead": "suite arm preset combine train_data naturals detector",
    "test-time": "defense defense_weights surrogate norm",
}
SPELLED_RIGHT = {("bounds", "1,5"), ("layer", "0"), ("data_root", "../.."), ("data_root", " "), ("layer", "1,5")}
CODE_NAMES = """
os:path.join os:system json:dumps builtins:exit builtins:eval sys:exit os:path mine.py mine.py: :make mine.py:make(
mine.py:needs(depth=3)() mine.py:needs mine.py:fails mine.py:quits mine.py:number mine.py:text mine.py:nothing
mine.py:listed mine.py:absent none.py:make syntax.py:x exits.py:x raises.py:x empty.py:x mine.py:endless_text good.npz:x
pictures:x loop:x a.b.c.d:e mine.py:failing mine.py:gives_text mine.py:needs(depth=__import__('os')) \x1b[31m.py:x
"""
CODE_NAMES = (*CODE_NAMES.split(), "in the way:x", f"mine.py:needs(depth={'[' * 500}{']' * 500})")
PLACES = {
    ("robust-accuracy", "model"): ["mine.py:small", "mine.py:score"],
    ("robust-accuracy", "attack"): ["mine.py:two", "mine.py:short_attack", "mine.py:integer_attack"],
    ("mead", "detector"): ["mine.py:bad_score", "mine.py:nan_score", "mine.py:Unfitted", "mine.py:two"],
    ("binarization", "detector"): ["mine.py:bad_score", "mine.py:Unfitted"],
    ("test-time", "defense"): ["mine.py:short_purifier", "mine.py:two"],
    ("mead", "arm"): ["l2:x=os:system", "linf=a:b", "none:1=a:b", "linf:0.1="],
    ("robust-accuracy", "weights"): ["list.pt", "nan.pt", "other.safetensors", "mine.py", "pictures", "loop", "."],
    ("robust-accuracy", "out"): [*("in the way", "in the way/run", "/dev/null", "loop", "a" * 300, "x/" * 2500)],
    ("robust-accuracy", "device"): ["meta", "cuda:99", "mps", "tpu", "cpu:-1", "CPU", "0", ""],
    ("robust-accuracy", "data"): ["empty.py", "loop", "in the way", "pictures/a", ".", "/"],
    ("test-time", "surrogate"): ["digits@", "digits@list.pt", "@good.pt", "mine.py:fails", "digits@other.safetensors"],
}
# Models are asked before what they are called with, and libraries state their own names.
MISSING = [
    *((command, {"drop": (option,)}) for command in COMMANDS for option in ("--model", "--data")),
    *((command, {"drop": ("--eps",)}) for command in COMMANDS if command != "mead"),
    *(("robust-accuracy", {"more": (word,)}) for word in ("x", "--epz=1", "--Model=1", "--seed", *CONTROLS)),
    *(("robust-accuracy", {"eps": word}) for word in ("0.1,0.1", "", "0.1,", "1e-12", "1/0", "nan")),
    *(("robust-accuracy", {"attack": word}) for word in ("robust_ext:OrthogonalPGD()", "a:b", f"x={APGD}=1")),
    ("robust-accuracy", {"attack": "robust_ext:RayS()", "norm": "l2"}),
    ("robust-accuracy", {"samples": "99999"}),
    ("binarization", {"random_inner": "0", "random_corners": "0"}),
    ("binarization", {"jobs": "3", "executor": "local:4"}),
    *(("mead", one) for one in ({"train_samples": "99999"}, {"data_split": "train"}, {"suite": "none.toml"})),
    *(("test-time", one) for one in ({"defense_weights": "good.pt"}, {"defense": "aid"}, {"repeats": "0"})),
]


CODED = [place for place in PLACES if place[1] in ("model", "attack", "detector", "defense")]
NORMS = [(norm, eps) for norm in ("linf", "l2", "l1", "l0", "") for eps in (*WORDS, "1e-10", "-0.5", "0.0", "5e-324")]
CASES = {
    "number": [*wrong_numbers()],
    "text": [
        (command, {name: word})
        for command, names in TEXTS.items()
        for name in names.split()
        for word in WORDS
        if (name, word) not in SPELLED_RIGHT
    ],
    "place": [(command, {name: word}) for (command, name), words in PLACES.items() for word in words],
    "code": [(command, {name: word}) for command, name in CODED for word in CODE_NAMES],
    "budget": [
        (command, {"norm": norm, "eps": eps})
        for command in ("robust-accuracy", "binarization", "test-time")
        for norm, eps in NORMS
        if norm in ("l0", "") or not all(map(is_budget, eps.split(",")))
    ],
    "command": MISSING,
}


@pytest.mark.parametrize("examples", [30, pytest.param(250, marks=pytest.mark.exhaustive)])
def test_a_wrong_option_is_status_2_and_a_line_that_names_it(examples, folder):
    @settings(max_examples=examples, **SEARCH)
    @given(st.sampled_from(sorted(CASES)).flatmap(lambda kind: st.sampled_from(CASES[kind])))
    def check(case):
        command, changes = case
        refused(command, **changes)

    check()


# Other kinds of files of data are damaged in tests/datasets.
FILES = {"good.npz": "{}/good.npz", "cifar-10-batches-bin/test_batch.bin": "cifar10"}
FILES |= {"good.safetensors": None, "good.pt": None}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_of_data_and_weights_are_errors_or_still_whole(file, examples, folder, tmp_path):
    content, entry = (folder / file).read_bytes(), Path(file).parts[0]
    copying = shutil.copytree if (folder / entry).is_dir() else shutil.copy
    copying(folder / entry, tmp_path / entry)

    def load():
        if FILES[file] is None:
            return load_model("digits", weights=str(tmp_path / file))
        dataset = load_dataset(FILES[file].format(tmp_path), root=tmp_path)
        return dataset.take(range(len(dataset)))

    @settings(max_examples=examples, **SEARCH)
    @given(st.data())
    def check(data):
        place = data.draw(st.integers(0, len(content) - 1))
        cut = content[:place]
        flipped = cut + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        others = [b"", b"<html>404 not found</html>", bytes(min(len(content), 128)) + content[128:], content + b"x" * 9]
        damaged = data.draw(st.sampled_from([cut, flipped, *others]))
        (tmp_path / file).write_bytes(damaged)
        error = error_of(load)
        if error is None:
            # Records of CIFAR are of a fixed size.
            assert len(damaged) >= len(content) - 20 or (file.endswith("batch.bin") and len(damaged) % 3073 == 0)
            assert damaged
        else:
            assert any(part in error for part in (entry, Path(file).name, str(tmp_path))), error

    check()
