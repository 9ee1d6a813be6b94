"""Bad names of code, files, folders, devices and attacks on the command line."""

import ast
import inspect

from robust_ext.registry.base import adapters
from tests.fuzz.command_line import CONTROLS, WORDS, line
from tests.fuzz.judging import Case, words

_NUMERIC = ("foolbox", "art", "torchattacks", "adv_lib", "robust_ext")
_CODE = (
    *words(
        """
    os.path:join os:system json:dumps builtins:print builtins:exit builtins:eval sys:exit os:path mine.py
    mine.py: :make mine:make:make mine.py:make( mine.py:make(depth=3) mine.py:make()() mine.py:needs
    mine.py:fails mine.py:quits mine.py:number mine.py:text mine.py:nothing mine.py:listed mine.py:absent
    none.py:make syntax.py:x exits.py:x raises.py:x empty.py:x latin.py:name mine.py:nothing_made
    mine.py:endless_text good.npz:x pictures:x loop:x a.b.c.d:e mine.py:needs(depth=__import__('os'))
    mine.py:needs(depth=1e999)
"""
    ),
    "in the way:x",
    f"mine.py:needs(depth={'[' * 500}{']' * 500})",
)
_KINDS = ("none", "text", "one", "nan", "row", "flat", "softmax", "int", "tuple", "inf", "complex", "empty")
_MODELS = (
    *(f"mine.py:wrong(kind='{kind}')" for kind in _KINDS),
    *(f"mine.py:{name}" for name in ("raises", "small", "score", "attack", "Wrong")),
)
_ATTACKS = words(
    """
    two failing_attack quitting_attack text_attack short_attack integer_attack number text
"""
)
_DETECTORS = words("bad_score text_score nan_score failing_score detector number two Unfitted listed")
_DEFENSES = ("bad_purifier", "text_purifier", "failing_purifier", "bad_defense", "number", "listed", "two", "nothing")
_WEIGHTS = (*words("list.pt odd.pt nan.pt other.safetensors pickled.pt mine.py pictures loop ."), "in the way")
_FOLDERS = (
    *("in the way", "in the way/run", "/dev/null", "/dev/null/run", "/proc/run", "loop", "a" * 300, "x/" * 2500),
    *("other run", "damaged run", "mine.py", "good.npz", "\udcff\x1b/\n"),
)
_DEVICES = (*words("meta cuda cuda:99 mps tpu xla cpu:99 cpu:-1 CPU 0 cuda:x hpu privateuseone"), "")


def code(rng):
    """Models, attacks, detectors and defenses that are none."""
    while True:
        spec = rng.choice([*_CODE, *_CODE, rng.choice(CONTROLS) + ".py:x", f"{rng.choice(WORDS)}:{rng.choice(WORDS)}"])
        kind = rng.randrange(6)
        if kind == 0:
            yield line("robust-accuracy", category="code", model=rng.choice([spec, *_MODELS]))
        elif kind == 1:
            yield line("binarization", category="code", model=rng.choice([spec, *_MODELS]))
        elif kind == 2:
            attack = rng.choice([spec, *(f"mine.py:{name}" for name in _ATTACKS)])
            yield line(rng.choice(["robust-accuracy", "binarization"]), category="code", attack=attack)
        elif kind == 3:
            detector = rng.choice([spec, *(f"mine.py:{name}" for name in _DETECTORS)])
            yield line(rng.choice(["mead", "binarization"]), category="code", detector=detector)
        elif kind == 4:
            defense = rng.choice([spec, *(f"mine.py:{name}" for name in _DEFENSES)])
            yield line("test-time", category="code", defense=defense)
        else:
            arm = rng.choice([f"linf:0.1={spec}", f"l2:x={spec}", f"linf={spec}", spec, f"none:1={spec}", "linf:0.1="])
            yield line("mead", category="code", arm=arm)


def labels(rng):
    """Names of attacks, which may be any text and are shown in bars, tables and files."""
    while True:
        label = f"{rng.choice(CONTROLS)}{rng.choice(WORDS)}".replace("=", "").replace(":", "").replace("(", "")
        attack = f"{label}=robust_ext:APGD(steps=1)"
        meaning = "" if "\udcff" in label else "a label, written out"
        drop = ("--no-progress",) if rng.random() < 0.5 else ()
        yield line("robust-accuracy", category="labels", attack=attack, drop=drop, meaning=meaning)


def files(rng):
    """Weights, run folders, data and devices that cannot be used."""
    while True:
        kind = rng.choice(["weights", "out", "device", "data", "surrogate"])
        command = rng.choice(["robust-accuracy", "binarization", "test-time"])
        if kind == "weights":
            yield line(command, category="files", weights=rng.choice([*_WEIGHTS, rng.choice(WORDS)]))
        elif kind == "out":
            command, out = rng.choice(["robust-accuracy", "binarization"]), rng.choice(_FOLDERS)
            new = out == _FOLDERS[-1] or (command == "robust-accuracy" and out.endswith(" run") and "/" not in out)
            yield line(command, category="files", out=out, meaning="a folder without such a run" if new else "")
        elif kind == "device":
            device = rng.choice(_DEVICES)
            meaning = "the CPU, whose number torch does not look at" if device == "cpu:99" else ""
            yield line(command, category="files", device=device, meaning=meaning)
        elif kind == "data":
            data = rng.choice(
                ["pictures", "empty.py", "mine.py", "loop", "in the way", "other run", "good.npz", ".", "/", "mnist"]
            )
            model = "mine.py:small" if data in ("pictures", "good.npz", "mnist", ".") else "digits"
            yield line(command, category="files", data=data, model=model)
        else:
            spec = rng.choice(
                ["digits@", "digits@list.pt", "@good.pt", "mine.py:fails", "mine.py:small", "digits@other.safetensors"]
            )
            yield line("test-time", category="files", surrogate=spec)


def attacks(rng):
    """Attacks of every library with a setting that makes no sense, as objects: nothing is run."""
    listed = [(name, entry) for name in _NUMERIC for entry in adapters()[name].list_attacks() if not entry.reason]
    while True:
        library, entry = rng.choice(listed)
        parameters = _parameters(library, entry.name)
        if not parameters:
            continue
        name, default = rng.choice(parameters)
        value = rng.choice(
            ["-5", "0", "1e400", "'no'", "None", "[1]", "{'a': 1}", "-1e400", "True", "2.5", "1e30", "''", "10**9"]
        )
        text = f"{library}:{entry.name}({name}={value})"
        yield Case(category="attacks", call=_build(text), words=text, meaning=_meaning_of_setting(name, default, value))
        yield _garbled(rng, f"{library}:{entry.name}()")


def _garbled(rng, text):
    place, letters = rng.randrange(len(text)), list(text)
    letters[place] = rng.choice(
        ["", "::", "(", ")", "\x1b", " ", letters[place] * 2, "é", "\n", "=", "1", rng.choice(WORDS)]
    )
    text = "".join(letters)
    scope, _, call = text.partition(":")
    try:
        known = isinstance(ast.parse(call.strip(), mode="eval").body, (ast.Call, ast.Name))
    except (SyntaxError, ValueError):
        known = False
    same = scope.strip() in _NUMERIC and known
    return Case(
        category="attacks", call=_build(text), words=ascii(text), meaning="the attack of that name" if same else ""
    )


def _build(text):
    from robust_ext import as_attack

    return lambda: as_attack(text)


def _parameters(library, name):
    from importlib import import_module

    if library == "robust_ext":
        from robust_ext.attacks.catalogue import ATTACKS

        made_of = next(one for one in ATTACKS if one.__name__ == name)
    else:
        made_of = import_module(f"robust_ext.adapters.{library}.attack").CATALOGUE.members.get(name)
    if made_of is None:
        return []
    hidden = ("self", "model", "estimator", "classifier", "inputs", "labels", "callback", "kwargs")
    return [(p.name, p.default) for p in inspect.signature(made_of).parameters.values() if p.name not in hidden]


def _meaning_of_setting(name, default, value):
    """Why a value may be accepted: it is of the default's kind, and no number of steps, rows or the like."""
    try:
        given = ast.literal_eval(value)
    except ValueError:
        return ""
    if name == "p" and given == float("inf"):
        return "an order of norms"
    counted = any(
        word in name for word in ("steps", "iter", "restarts", "queries", "repeats", "batch_size", "stepsize")
    )
    if (
        given is None
        or given is default
        or isinstance(given, (list, dict))
        or not isinstance(default, (bool, int, float, str))
    ):
        return "an object, or a setting of which the library states no kind"
    if isinstance(default, bool) or isinstance(given, bool):
        return "a flag" if type(given) is type(default) else ""
    if isinstance(default, str) or isinstance(given, str):
        words = "a text, which the library checks when it is run"
        return words if type(given) is type(default) or name in ("norm", "layer", "distance", "penalty") else ""
    if counted:
        return "a number of the range" if given > 0 else "none of an optional search"
    return "a finite number of a setting that states no range" if abs(given) <= 1e9 else ""
