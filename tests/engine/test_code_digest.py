"""Digests of code: what changes them and what does not, in files, in scripts and in the values that code holds."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.transfer import Transfer
from robust_ext.demo.network import digits_network
from robust_ext.engine.code_digest import attack_code, module_code, object_code, text_code
from robust_ext.engine.identity import model_digest

FUNCTIONS = "".join(f"def f{n}(x): return f{n + 1}(x)\n" for n in range(99))
SCRIPT = f"""
import functools
import math
import torch
{FUNCTIONS}
def f99(x): return x
STEPS = 40
SCHEDULE = {{"first": 0.1, "then": [0.05, 0.01]}}
UNUSED = 1
def unrelated():
    return 1
def ascend(x):
    return x + SCHEDULE["first"]
class Options:
    rate = 0.5
    def __init__(self):
        self.floor = 0.25
    def of(self, x):
        return max(x * self.rate, self.floor)
    @property
    def names(self):
        return {{"a", "b", "c", "d"}}
    @staticmethod
    def double(x):
        return 2 * x
OPTIONS = Options()
class Deep(dict):
    def __init__(self, depth):
        super().__init__(inner=Deep(depth - 1) if depth else None)
DEEP = Deep(3)
def noted(function):
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments)
    return inner
@noted
def attack(model, x, y, scale=1.0):
    for _ in range(STEPS):
        x = ascend(f0(x)) if DEEP else x
    def last(x):
        import helper_of_a_script
        return [math.sqrt(value) * 3 for value in x]
    return last(OPTIONS.of(x) * scale), lambda: attack
"""


def of_script(text):
    scope = {"__name__": "__main__"}
    exec(compile(text, "<stdin>", "exec"), scope)  # noqa: S102
    return attack_code(as_attack(scope["attack"]))


UNRELATED = [
    *[("UNUSED = 1", "UNUSED = 2"), ("return 1\n", "return 2\n"), ("STEPS = 40", "STEPS = 4 * 10")],
    ("\nimport math", "\n\n\n# Further down.\nimport math"),
    ("def ascend(x):", "def other():\n    pass\n\ndef ascend(x):  # Up."),
]
RELATED = [
    *[("STEPS = 40", "STEPS = 0"), ("0.05", "0.04"), ('x + SCHEDULE["first"]', 'x - SCHEDULE["first"]')],
    *[("rate = 0.5", "rate = 0.6"), ("Deep(3)", "Deep(4)"), ("def f99(x): return x", "def f99(x): return -x")],
    *[("class Deep(dict):", "class Deep(dict):\n    other = 1"), ("x * self.rate", "x / self.rate")],
    *[("self.floor = 0.25", "self.floor = 0.75"), ('"d"}', '"e"}'), ("2 * x", "3 * x"), ("scale=1.0", "scale=2.0")],
    *[("* 3 for", "* 4 for"), ("return function(*arguments)", "return arguments[1]"), ("math.sqrt", "math.exp")],
]


def test_what_a_script_s_attack_consists_of_changes_it_and_an_unrelated_line_does_not(tmp_path, monkeypatch):
    whole = of_script(SCRIPT)
    for old, new in (*UNRELATED, *RELATED):
        assert SCRIPT.count(old) == 1
        assert (of_script(SCRIPT.replace(old, new)) == whole) == ((old, new) in UNRELATED), new
    # Imports in functions count.
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_of_a_script.py").write_text("VALUE = 1")
    assert set(of_script(SCRIPT)) - set(whole) == {"helper_of_a_script.py"}


PRINT = """
import json, sys
from robust_ext import as_attack
from robust_ext.engine.code_digest import attack_code, module_code
from robust_ext.demo.network import digits_network
attacks = [attack, as_attack("robust_ext:APGD()"), as_attack("foolbox:LinfPGD(steps=3)"), as_attack(sys.argv[1])]
print(json.dumps([attack_code(as_attack(one)) for one in attacks] + [module_code(digits_network())]))
"""


def test_the_same_in_every_process(tmp_path, monkeypatch):
    """Whatever the order of sets and the addresses of objects are; by the text and by the objects alike."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "script.py").write_text(SCRIPT + PRINT)
    (tmp_path / "helper_of_a_script.py").write_text("def attack(model, x, y):\n    return x\n")
    text = f"{tmp_path}/helper_of_a_script.py:attack"
    command = [sys.executable, str(tmp_path / "script.py"), text]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, others = json.loads(done.stdout), ("robust_ext:APGD()", "foolbox:LinfPGD(steps=3)", text)
    here = [of_script(SCRIPT), *(attack_code(as_attack(one)) for one in others), module_code(digits_network())]
    assert first == json.loads(json.dumps(here))
    assert first[3] == text_code(text)
    assert first[3].keys() == {"helper_of_a_script.py", "values"}


class Stepping:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, model, x, y):
        return x + self.steps

    def method(self, model, x, y):
        return x - self.steps


def make(steps):
    def attack(model, x, y):
        return x + steps

    return attack


def keyword(model, x, y, *, steps=3):
    return x + steps


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()


def circular(steps):
    held = {"steps": steps}
    held["itself"] = held
    return make(held)


VALUES = {
    "closure": make,
    "closure of a tensor": lambda k: make(torch.full((3,), float(k))),
    "closure of an array": lambda k: make(np.full(3, k)),
    "closure of a network": lambda k: make(network(k)),
    "closure of a function": lambda k: make(make(k)),
    "closure of a dtype": lambda k: make([torch.float32, torch.float64][k - 1]),
    "closure of what holds itself": circular,
    "object": Stepping,
    "bound method": lambda k: Stepping(k).method,
    "partial of a partial": lambda k: functools.partial(functools.partial(keyword), steps=k),
    "cached": lambda k: functools.lru_cache(make(k)),
    "BPDA": lambda k: AdaptedAttack(attack=as_attack(make(k), name="mine")),
    "BPDA of own": lambda k: AdaptedAttack(attack=APGD(steps=k)),
    "transfer": lambda k: Transfer(surrogates={"other": network(k)}, attacks=[APGD()]),
    "host": lambda k: as_attack(f"foolbox:LinfPGD(steps={k})", name="mine"),
}


def test_the_values_that_attacks_hold_count_and_their_file_through_whatever_holds_it():
    """Own attacks consist of nothing but their settings."""
    for name, made in VALUES.items():
        first, again, other = (attack_code(as_attack(made(k))) for k in (1, 1, 2))
        assert first == again != other, name
        inside = any(one.endswith("test_code_digest.py") for one in first)
        assert inside == (name not in ("BPDA of own", "transfer", "host"))


class Net(nn.Module):
    def __init__(self, levels=8, act=torch.relu, **options):
        super().__init__()
        self.levels, self.act, self.options = levels, act, options
        self.register_buffer("mean", torch.tensor(options.get("mean", 0.5)), persistent=False)
        self.layer = network(0)
        self.shown = (1, "a", None)

    def forward(self, x):
        self.last = {"x": x}
        return self.layer(self.act(x * self.levels).round() / self.levels - self.mean)


def hooked(hook):
    made = Net()
    made.layer.register_forward_hook(hook)
    return made


def patched(forward):
    made = Net()
    made.forward = forward.__get__(made)
    return made


def buffered(tensor):
    made = nn.Flatten()
    made.register_buffer("more", tensor)
    return made


HOOKS = [None, lambda *arguments: 2 * arguments[-1], lambda *arguments: 0.5 * arguments[-1]]


MODELS = {
    "plain attribute": lambda k: Net(levels=k),
    "lambda": lambda k: Net(act=lambda x: x + k),
    "buffer that is not kept": lambda k: Net(mean=0.25 * k),
    "hook": lambda k: hooked(HOOKS[k]),
    "patched forward": lambda k: patched(HOOKS[k]),
    "sparse buffer": lambda k: buffered(torch.eye(3).mul(k).to_sparse()),
    "quantized buffer": lambda k: buffered(torch.quantize_per_tensor(torch.eye(3) * k, 0.1, 0, torch.qint8)),
    "traced": lambda k: torch.jit.trace(nn.Sequential(nn.LeakyReLU(0.1 * k)), torch.ones(2)),
}


def described(module):
    return model_digest(module), module_code(module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize:UserWarning")
def test_what_a_model_consists_of_and_not_what_it_computes():
    for name, made in MODELS.items():
        model, again, other = (made(k) for k in (1, 1, 2))
        first = described(model)
        assert first == described(again) != described(other), name
        if isinstance(model, Net):
            model(torch.rand(2, 4))
            assert described(model) == first


def test_text_names_code_by_contents_wherever_they_lie_and_by_arguments(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("import beside\nraise SystemExit\n")
        (tmp_path / name / "beside.py").write_text("K = 1\n")
    first, second = (text_code(f"{tmp_path / name / 'mine.py'}:attack(k=1)") for name in ("one", "two"))
    assert first == second != text_code(f"{tmp_path}/one/mine.py:attack(k=2)")
    (tmp_path / "one" / "beside.py").write_text("K = 2\n")
    assert text_code(f"{tmp_path}/one/mine.py:attack(k=1)") != first


def test_the_points_that_a_purifier_leaves_are_no_code():
    purifier = Stepping(0.5)
    before, purifier.trajectory = object_code(purifier), [torch.ones(2, 3)]
    assert object_code(purifier) == before
    purifier.steps = 0.25
    assert object_code(purifier) != before
