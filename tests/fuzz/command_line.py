"""Bad command lines: one thing at a time is wrong in a command that works."""

import math
import typing

from robust_ext.cli.evaluations import BinarizationOptions
from robust_ext.cli.loading import RunOptions
from robust_ext.cli.mead import MeadOptions
from robust_ext.cli.options import option_name
from robust_ext.core.settings import declared, default_of, setting_types
from robust_ext.evaluations.adaptive import AdaptiveSettings
from robust_ext.evaluations.binarization import BinarizationSettings
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings
from tests.fuzz.judging import Case, words

_RUN = {"--data": "digits", "--samples": "2", "--model": "digits", "--no-progress": None, "--in-process": None}
_APGD = "robust_ext:APGD(steps=1)"
COMMANDS = {
    "robust-accuracy": {**_RUN, "--eps": "0.1", "--attack": _APGD},
    "binarization": {
        **_RUN,
        **{"--eps": "0.1", "--attack": _APGD, "--inner-points": "10", "--random-inner": "2", "--random-corners": "2"},
        **{"--canaries": "0", "--proven-rate": "0"},
    },
    "mead": {
        **_RUN,
        **{"--arm": "linf:0.1=robust_ext:ObjectivePGD(steps=1)", "--detector": "mine.py:score", "--resamples": "2"},
        **{"--train-samples": "4", "--calibration-samples": "25", "--adversarial-samples": "2"},
    },
    "test-time": {**_RUN, "--eps": "0.1", "--defense": "bit-depth", "--steps": "1", "--queries": "2", "--draws": "1"},
}
_DECLARED = {
    "robust-accuracy": (RunOptions, RobustAccuracySettings),
    "binarization": (RunOptions, BinarizationOptions, BinarizationSettings),
    "mead": (RunOptions, MeadOptions, MeadSettings),
    "test-time": (RunOptions, AdaptiveSettings),
}
CONTROLS = ("\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\r\x1b[K", "\u202e", "\x00", "\udcff", "\x7f", "\b\b", "\u2028")
WORDS = (
    *words(
        """
    nan inf -inf 1e400 -1 0 -0 1e-400 0x10 1_0 1,5 1/0 -- None True -5 0.5 1.5 1e20 ten [1] {} '1' 1;2 $(id)
    ../.. ~ %s%n <b> [bold]x[/] NULL 1e3 +3 1e-45 0/1 8/255
"""
    ),
    "",
    " ",
    "9" * 400,
    "9" * 5000,
    "٣",
    "½",
    "\u00e9\u0301",
    "😀",
    "a" * 3000,
    *CONTROLS,
)


def line(command, *, drop=(), process=False, category, meaning="", **changes):
    """A command line with options changed (``eps="x"`` for ``--eps x``), or left out."""
    options = {**COMMANDS[command], **{f"--{key.replace('_', '-')}": value for key, value in changes.items()}}
    return assemble(command, options, drop=drop, process=process, category=category, meaning=meaning)


def assemble(command, options, *, drop=(), process=False, category, meaning=""):
    # An option and its value as one word: a value may begin with a dash.
    parts = [name if value is None else f"{name}={value}" for name, value in options.items() if name not in drop]
    return Case(category=category, arguments=(command, *parts), meaning=meaning, process=process)


def numbers(rng):
    """A numeric option with a word that is no number in its range."""
    while True:
        command = rng.choice(list(COMMANDS))
        cls = rng.choice(_DECLARED[command])
        name, info = rng.choice(list(declared(cls).items()))
        kind = setting_types(cls)[name]
        kinds = {kind, *typing.get_args(kind)}
        if (
            not kinds & {int, float}
            or bool in kinds
            or typing.get_origin(kind) is tuple
            or name in ("jobs", "attack_timeout")
        ):
            continue
        if info.names.get("cli", "") is None:
            continue
        word = rng.choice(WORDS)
        legal = _legal(word, info, float in kinds)
        cheap = legal is None or legal <= 3 or name == "seed"
        if cheap and not _contradicts(command, name, legal):
            option = option_name(name, info)
            text = "" if legal is None else f"{option} is a number in its range"
            # Where only one of several texts is a choice besides.
            yield assemble(command, {**COMMANDS[command], option: word}, category="numbers", meaning=text)


def _legal(word, info, real):
    """The number that a word stands for, where the declared range has it; by Python's own reading, not ours."""
    try:
        number = float(word) if real else int(word)
    except ValueError:
        return None
    low = -math.inf if info.minimum is None else info.minimum
    high = 10**9 if info.maximum is None else info.maximum
    above = -math.inf if info.above is None else info.above
    below = math.inf if info.below is None else info.below
    return number if low <= number <= high and above < number < below else None


def _contradicts(command, name, legal):
    """Whether a legal number does not fit the other options, so that it may be refused after all."""
    return legal is not None and name in ("calibration_samples", "train_samples", "inner_points")


def texts(rng):
    """An option of texts with words that name nothing."""
    names = {
        "robust-accuracy": words("model weights bounds data data_root data_split order device executor devices"),
        "binarization": words("model norm boundary readout layer exposure detector kappa_convention attack"),
        "mead": ("suite", "arm", "preset", "combine", "train_data", "naturals", "detector", "data"),
        "test-time": ("defense", "defense_weights", "surrogate", "norm", "model"),
    }
    legal = {("data_root", "../.."), ("data_root", "~"), ("data_root", " ")}
    while True:
        command = rng.choice(list(COMMANDS))
        name, word = rng.choice(names[command]), rng.choice([*WORDS, _garbled(rng, "digits"), _garbled(rng, _APGD)])
        if (name, word) not in legal and (name, word.strip()) not in {("model", "digits"), ("data", "digits")}:
            yield line(command, category="texts", meaning=_meaning_of_text(name, word), **{name: word})


def _meaning_of_text(name, word):
    if name == "attack" and word == _APGD:
        return "an attack"
    if name == "layer" and all(part.strip() in {*map(str, range(1, 8))} for part in word.split(",")):
        return "layers of the digits network"
    return "a device of this torch" if name == "device" and word == "cpu" else ""


def budgets(rng):
    """``--eps``, ``--bounds`` and ``--norm`` together; by float64 arithmetic of its own."""
    while True:
        command = rng.choice(["robust-accuracy", "binarization", "test-time"])
        norm = rng.choice(["linf", "l2", "l1", "l0", "", "Linf", "2"])
        eps = rng.choice([*WORDS, f"1e-{rng.randint(1, 40)}", f"{rng.uniform(-1, 1):.3g}", f"1/{rng.randint(-3, 300)}"])
        low, high = rng.choice([("0", "1"), ("-1", "1"), ("0", "255"), (rng.choice(WORDS), rng.choice(WORDS))])
        budgets = eps.split(",") if command == "robust-accuracy" else [eps]
        good = all(_budget_makes_sense(norm, one, low, high) for one in budgets)
        yield line(
            command,
            category="budgets",
            meaning="a budget that float32 resolves" if good else "",
            norm=norm,
            eps=eps,
            bounds=f"{low},{high}",
        )


def _budget_makes_sense(norm, eps, low, high):
    def read(word):
        above, _, below = word.partition("/")
        return float(above) / (float(below) if "/" in word else 1.0)

    try:
        parts = f"{low},{high}".split(",")
        epsilon, low, high = read(eps), read(parts[0]), read(parts[1])
    except (ValueError, ZeroDivisionError, IndexError):
        return False
    if len(parts) != 2 or norm not in ("linf", "l2", "l1") or not -1e9 <= low < high <= 1e9:
        return False
    size = max(abs(low), abs(high))
    growth = {"linf": 1, "l2": 8, "l1": 64}[norm]
    return 10 * 2**-24 * size * growth <= epsilon <= 1e20 and high - low >= max(1e-6 * size, 1e-9)


def shapes_of_commands(rng):
    """Options left out, unknown, repeated, without a value; and words that are no commands."""
    required = {
        "robust-accuracy": ("--eps", "--attack"),
        "binarization": ("--eps", "--attack"),
        "mead": ("--detector",),
    }
    while True:
        command = rng.choice(list(COMMANDS))
        kind = rng.choice(["missing", "unknown", "command", "no value", "extra", "conflict"])
        if kind == "missing":
            drop = (rng.choice([*required.get(command, ("--eps", "--defense")), "--model", "--data"]),)
            yield line(command, drop=drop, category="commands")
        elif kind == "unknown":
            yield line(
                command, category="commands", **{rng.choice(["epz", "Model", "x" * 200, *CONTROLS, "no-eps"]): "1"}
            )
        elif kind == "command":
            yield Case(category="commands", arguments=(rng.choice([w for w in WORDS if w != "--"]),))
        elif kind == "no value":
            option = rng.choice(["--eps", "--samples", "--model", "--seed", "--out", "--weights"])
            yield Case(category="commands", arguments=(*line(command, category="").arguments, option))
        elif kind == "extra":
            yield Case(
                category="commands", arguments=(*line(command, category="").arguments, rng.choice(["x", "1", "-"]))
            )
        else:
            changes = rng.choice(_CONFLICTS.get(command, [{"jobs": "2", "executor": "local:3"}]))
            yield line(command, category="commands", **changes)


_CONFLICTS = {
    "binarization": [
        {"exposure": "reject"},
        {"random_inner": "0", "random_corners": "0"},
        {"jobs": "3", "executor": "local:4"},
    ],
    "robust-accuracy": [
        {"attack": "robust_ext:OrthogonalPGD()"},
        {"attack": "robust_ext:RayS()", "norm": "l2"},
        {"eps": "0.1,0.1"},
        {"samples": "99999"},
        {"eps": ""},
        {"eps": "0.1,"},
        {"weights": "good.pt", "model": "mine.py:fails"},
    ],
    "mead": [{"train_samples": "99999"}, {"data_split": "train"}, {"combine": "median"}, {"suite": "none.toml"}],
    "test-time": [
        {"defense_weights": "good.pt"},
        {"defense": "aid"},
        {"surrogate": "digits@none.pt"},
        {"repeats": "0"},
    ],
}


def _garbled(rng, text):
    letters = list(text)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(letters))
        letters[place] = rng.choice(
            ["", letters[place] * 2, rng.choice("():,='\"[]{}\x1b\\é0"), rng.choice(WORDS[:40])]
        )
    return "".join(letters) or "x"


assert default_of(RunOptions, "bounds") == "0,1"
