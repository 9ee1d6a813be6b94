"""Attacks in processes of their own: the same results, and nothing of what goes wrong there reaches the judge."""

import contextlib
import ctypes
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn
from typer.testing import CliRunner

from robust_ext import ThreatModel, as_attack, binarization_test, diagnose, evaluate_defense, mead, robust_accuracy
from robust_ext.cli import app as cli
from robust_ext.core.errors import AttackError, IsolationError, RobustExtError
from robust_ext.demo.network import digits_network
from robust_ext.engine.isolation import messages, process
from robust_ext.engine.isolation.messages import pack
from robust_ext.engine.running import attack_worker
from robust_ext.engine.task import run_task
from robust_ext.engine.trace import no_values
from robust_ext.evaluations.binarization import kernel, problems

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = digits_network()(X).argmax(1)
PLANTED = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2, "judge_seed": 7}
ATTACKS = {
    "ours": "robust_ext:APGD(steps=5)",
    "foolbox": "foolbox:LinfPGD(steps=3)",
    "art": "art:FastGradientMethod",
    "noise": lambda model, x, y, generator: (x + 0.1 * torch.rand(x.shape, generator=generator).sub(0.5)).clamp(0, 1),
}


def brightness(x):
    return x.flatten(1).mean(1)


def rounded(x):
    return (x * 8).round() / 8


def plain(value):
    """Content without what differs between any two runs."""
    if isinstance(value, dict):
        measured = ("isolated", "time")
        return {key: plain(one) for key, one in value.items() if "seconds" not in key and key not in measured}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


class Unloadable:
    """An attack that its process cannot read."""

    def __call__(self, model, x, y):
        return x

    def __reduce__(self):
        return eval, ("1 / 0",)


CALLS = {
    "binarization": lambda attack, **kw: binarization_test(digits_network(), attack, X, THREAT_MODEL, **PLANTED, **kw),
    "robust accuracy": lambda attack, **kw: robust_accuracy(digits_network(), attack, X, Y, THREAT_MODEL, **kw),
    "diagnosis": lambda attack, **kw: diagnose(digits_network(), attack, X, Y, THREAT_MODEL, **kw),
    "mead": lambda attack, **kw: mead(digits_network(), [attack], X, Y, THREAT_MODEL, detectors=brightness, **kw),
    "test-time": lambda attack, **kw: evaluate_defense(
        rounded, [attack], X, Y, THREAT_MODEL, classifier=digits_network(), **kw
    ),
}


def accuracy(attacks, samples=4, **more):
    """What robust accuracy states of attacks, each in a process of its own, on a batch of four samples."""
    options = {"batch_size": 4, "isolate": True, **more}
    return robust_accuracy(digits_network(), attacks, X[:samples], Y[:samples], THREAT_MODEL, **options)


@pytest.fixture
def new_server():
    """No process that others are forked from runs before the test, and none of the test after it."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize(
    ("evaluation", "broken"), [*[(name, "load") for name in CALLS], ("robust accuracy", "start"), ("mead", "import")]
)
def test_a_process_that_cannot_start_ends_the_evaluation_with_the_cause(
    evaluation, broken, monkeypatch, new_server, tmp_path
):
    """It is no finding about the attack, no refusal of it and no sample that was lost."""
    if broken != "load":
        (tmp_path / "broken.py").write_text("raise SystemExit(1)" if broken == "start" else "raise ValueError")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(process, "_SERVER", "broken")
        monkeypatch.setattr(process, "serve", Unloadable())
    with pytest.raises(IsolationError, match="isolate=False"):
        CALLS[evaluation](Unloadable() if broken == "load" else as_attack(lambda model, x, y: x), isolate=True)


def test_a_process_imports_the_package_of_its_parent_whatever_the_working_directory_holds(
    tmp_path, monkeypatch, new_server
):
    """As in a clone, whose robust_ext has no adapters inside."""
    (tmp_path / "robust_ext").mkdir()
    (tmp_path / "robust_ext" / "__init__.py").write_text("raise SystemExit(7)")
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    found = accuracy(ATTACKS["foolbox"])
    assert found.content["isolated"]
    assert found.content["warnings"] == []


def dies(model, x, y):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(model, x, y):
    while True:
        time.sleep(1)


class Sends:
    """An attack that writes to every file that its process has, as a message of its own."""

    def __init__(self, *contents, framed=True):
        self.contents = [len(content).to_bytes(4, "big") + content if framed else content for content in contents]

    def __call__(self, model, x, y):
        for descriptor in range(3, 64):
            try:
                for content in self.contents:
                    os.write(descriptor, content)
            except OSError:
                continue
        hangs(model, x, y)


GOOD = {"seconds": 0.1, "passes": [1, 1], "warnings": [], "curve": None}
FOUND = {"candidates": X[:4]}
HUGE = b'{"header": {"dtype": "F32", "shape": [1073741824, 1073741824], "data_offsets": [0, 4611686018427387904]}}'
MESSAGES = [
    Sends(b"cos\nsystem\n(S'touch robust_ext_was_here'\ntR."),  # A pickle that runs a command where it is loaded.
    Sends(b"\xff\xfe"),
    Sends(save({"header": torch.tensor(list(b"[]"), dtype=torch.uint8)})),
    Sends(save({"header": torch.tensor(list(b"[" * 10**5), dtype=torch.uint8)})),
    Sends(pack({"progress": "x"})),
    Sends(pack({"progress": [-1, 0]})),
    Sends(pack({"lost": 3})),
    Sends(pack({})),
    Sends(pack(GOOD)),
    Sends(pack(GOOD, {"candidates": X[:3]})),
    Sends(pack(GOOD, {"others": X[:4]})),
    Sends(pack(GOOD, FOUND)[:-9]),
    Sends(pack({**GOOD, "seconds": math.nan}, FOUND)),
    Sends(pack({**GOOD, "passes": ["1", 1]}, FOUND)),
    Sends(pack({**GOOD, "curve": [{"query": 10**400}]}, {**FOUND, "trace": no_values(4)})),
    Sends(len(HUGE).to_bytes(8, "little") + HUGE),
    Sends((2**31 - 1).to_bytes(4, "big"), framed=False),
]


@pytest.mark.parametrize("attack", MESSAGES, ids=range(len(MESSAGES)))
def test_no_message_of_an_attacks_process_harms_the_judge(attack):
    assert accuracy({"one": attack}, attack_timeout=5.0).content["attacks"][0]["outcomes"]["ended"] == 4
    assert not Path("robust_ext_was_here").exists()


ERRORS = dict.fromkeys(("AttackError", "InvalidArgumentError", "Exception", "os", "RobustExtError"), RobustExtError)
# A process does not judge the time or the run folder.
ERRORS |= dict.fromkeys(("OutOfTimeError", "RunFolderError", "RunFolderBusyError"), AttackError)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_that_are_sent_become_errors_of_this_project(error):
    with pytest.raises(ERRORS[error], match="^one: mine" if ERRORS[error] is AttackError else "mine"):
        accuracy({"one": Sends(pack({"error": error, "text": "mine"}))})


@pytest.mark.parametrize("stated", [{"seconds": 1e308}, {"seconds": 10**400}, {"passes": [10**400, 10**400]}])
def test_counts_that_no_attack_reaches_are_cut_off(stated):
    result = accuracy({"one": Sends(pack({**GOOD, **stated}, FOUND))}, attack_timeout=60.0)
    (found,) = result.content["attacks"]
    assert found["outcomes"] == {"not_adversarial": 4}
    assert math.isfinite(float(found["seconds"]) + float(found["passes"]["forward"]))
    assert str(result)


def test_a_shape_is_compared_before_memory_is_taken_for_it():
    for isolate in (False, True):
        with pytest.raises(AttackError, match=r"returned shape \(1073741824, 1073741824\)"):
            accuracy(lambda model, x, y: x[0, 0, 0, :1].expand(2**30, 2**30), isolate=isolate)


def drips(model, x, y):
    """Sends a message byte by byte, and never all of it."""
    for number in range(10**4):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\x00\x00\x10\x00"[number : number + 1] or b"x")
        time.sleep(0.3)


def floods(model, x, y):
    """Sends counts without end."""
    content = pack({"progress": [1, 1]})
    while True:
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, len(content).to_bytes(4, "big") + content)


def stops_all(model, x, y):
    """Stops itself, and the process that it was forked from."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.killpg(0, signal.SIGSTOP)


def hands_on(model, x, y):
    """Leaves its connection to a process in a group of its own."""
    if os.fork() == 0:
        os.setsid()
        hangs(model, x, y)
    os._exit(0)


@pytest.mark.parametrize("attack", [drips, floods, stops_all, hands_on], ids=lambda attack: attack.__name__)
def test_a_deadline_is_kept_whatever_a_process_does(attack):
    begun = time.monotonic()
    result = accuracy({"one": attack, "other": ATTACKS["noise"]}, attack_timeout=4.0)
    first, second = result.content["attacks"]
    assert first["outcomes"] == {"timed_out": 4}
    assert sum(second["outcomes"].values()) == 4
    assert "timed_out" not in second["outcomes"]
    assert time.monotonic() - begun < 60


def closes_everything(model, x, y):
    os.closerange(3, 256)
    return x


def fills_memory(model, x, y):
    raise MemoryError("none left")


LOST = {
    "SystemExit(0)": lambda model, x, y: sys.exit(0),
    "exit status 0": lambda model, x, y: os._exit(0),
    "SIGKILL": dies,
    "out of memory": fills_memory,
    "ended": closes_everything,
    "more than 4 seconds": hangs,
}


@pytest.mark.parametrize("words", LOST)
def test_a_lost_process_costs_its_attack_these_rows_and_nothing_else(words):
    def sometimes(model, x, y):
        return LOST[words](model, x, y) if float(x[0, 0, 0, 0]) == float(X[4, 0, 0, 0]) else x + 0

    timed_out = LOST[words] is hangs
    attacks = {"first": sometimes, "second": ATTACKS["ours"]}
    result = accuracy(attacks, samples=10, attack_timeout=4.0 if timed_out else 60.0)
    first, second = result.content["attacks"]
    assert first["outcomes"] == {"timed_out" if timed_out else "ended": 4, "not_adversarial": 6}
    assert words in str(result)
    alone = accuracy({"second": ATTACKS["ours"]}, samples=10, isolate=False)
    assert plain(second) == plain({**alone.content["attacks"][0], "difference": second["difference"]})


def test_nothing_that_is_sent_tells_what_is_planted(tmp_path, monkeypatch):
    sent, planted = [], []
    pickled, find, draw = messages.pickled, kernel.find_witnesses, problems.draw_candidates

    def find_and_note(*args, **settings):
        for witness in find(*args, **settings):
            planted.extend(witness.points.values())
            yield witness

    def draw_and_note(*args):
        points = draw(*args)
        planted.extend(points.flatten(0, 1))
        return points

    monkeypatch.setattr(messages, "pickled", lambda *args, **how: sent.append(pickled(*args, **how)) or sent[-1])
    monkeypatch.setattr(kernel, "find_witnesses", find_and_note)
    monkeypatch.setattr(problems, "draw_candidates", draw_and_note)
    out = tmp_path / "the run folder"
    result = binarization_test(digits_network(), ATTACKS, X, THREAT_MODEL, isolate=True, out=out, inner_points=60)
    seed, everything = result.content["settings"]["judge_seed"], b"".join(sent)
    assert len(planted) > 2 * len(X), "what is planted, and the witnesses of deeper problems"
    assert len(everything) > 100_000
    assert X[0].numpy().tobytes() in everything, "inputs are found in what is sent"
    for point in planted:
        assert point.numpy().tobytes() not in everything
    assert seed > 2**40
    assert str(seed).encode() not in everything
    assert seed.to_bytes(8, "little") not in everything
    assert b"the run folder" not in everything


def test_the_judges_seed_is_new_kept_and_can_be_given(tmp_path):
    def run(**options):
        chosen = {**PLANTED, "judge_seed": None, **options}
        return binarization_test(digits_network(), ATTACKS["ours"], X[:4], THREAT_MODEL, **chosen)

    def reach(result):
        return [record["random_reach"] for record in result.records]

    first, second = run(isolate=True, out=tmp_path), run(isolate=True)
    seed = first.content["settings"]["judge_seed"]
    assert reach(first) != reach(second) != reach(run())
    assert run(judge_seed=seed).records == first.records
    assert run(isolate=True, out=tmp_path).content["settings"]["judge_seed"] == seed, "the folder keeps it"
    assert reach(run()) == reach(run(judge_seed=0)), "in this process it is the seed of every draw"


CHEAT = """
import os, sys
from pathlib import Path
import robust_ext.engine.verify, robust_ext.engine.task
Path(__file__).with_name("loaded").open("a").write(f"{os.getpid()}\\n")
real = robust_ext.engine.task.verify

def found(candidates, inputs, *args, **settings):
    from dataclasses import replace
    return replace(real(candidates, inputs, *args, **settings), outcomes=("found",) * len(inputs))

robust_ext.engine.task.verify = found

def attack(model, x, y):
    return x
"""


@pytest.mark.parametrize("command", ["binarization", "robust-accuracy"])
def test_code_named_on_the_command_line_is_loaded_in_its_own_process_alone(tmp_path, command):
    file = tmp_path / "mine.py"
    file.write_text(CHEAT)
    data = ["--model", "digits", "--data", "digits", "--samples", "12", "--eps", "0.1", "--no-progress"]
    done = CliRunner().invoke(cli.app, [command, *data, "--attack", f"{file}:attack", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    processes = set((tmp_path / "loaded").read_text().split())
    assert processes
    assert str(os.getpid()) not in processes
    (attack,) = json.loads((tmp_path / "out" / "result.json").read_text())["attacks"]
    assert attack["outcomes"]["found"] == (0 if command == "binarization" else 1), "as many as are misclassified"
    assert run_task.__globals__["verify"].__name__ == "verify"


LOOKS = """
import os, sys
from pathlib import Path

def attack(model, x, y):
    shown = [" ".join(sys.argv).encode(), repr(os.environ).encode()]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown.append(file.read_bytes())
        except OSError:
            continue
    own = Path(__file__)
    own.with_name("found").write_text(str([one for one in shown if b"918273645" in one or b"judges own folder" in one]))
    own.with_name("shown").write_text(str(len(shown)))
    return x
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this")
def test_no_seed_or_folder_of_the_judge_is_on_a_command_line_while_attacks_run(tmp_path):
    (tmp_path / "mine.py").write_text(LOOKS)
    arguments = ["robust-accuracy", "--model", "digits", "--data", "digits", "--samples", "4", "--eps", "0.1"]
    more = ["--attack", "mine.py:attack", "--seed", "918273645", "--out", "judges own folder", "--no-progress"]
    done = subprocess.run(
        [sys.executable, "-m", "robust_ext", *arguments, *more], cwd=tmp_path, capture_output=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "shown").read_text()) > 3
    assert (tmp_path / "found").read_text() == "[]"


@pytest.mark.parametrize(
    ("code", "words"), [("import sys; sys.exit(0)", "SystemExit"), ("import os; os._exit(0)", "exit status 0")]
)
def test_code_that_exits_gives_no_status_0(tmp_path, code, words, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(code)
    arguments = ["binarization", "--model", "digits", "--data", "digits", "--samples", "12", "--eps", "0.1"]
    monkeypatch.setattr(sys, "argv", ["robust-ext", *arguments, "--attack", f"{tmp_path / 'mine.py'}:attack"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.exhaustive
def test_processes_end_with_the_judge(tmp_path):
    script = f"""
import os, signal, sys, torch
from pathlib import Path
from robust_ext import ThreatModel, robust_accuracy
from robust_ext.demo.network import digits_network

def attack(model, x, y):
    Path({str(tmp_path / "child")!r}).write_text(str(os.getpid()))
    os.kill(judge, signal.SIGKILL)
    while True:
        pass

if __name__ == "__main__":
    x, y = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    judge, threat_model = os.getpid(), ThreatModel(norm="linf", epsilon=0.1)
    robust_accuracy(digits_network(), attack, x, y, threat_model, isolate=True)
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, file], timeout=120)
    assert done.returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the attack goes on without its judge")


def test_a_process_that_is_killed_by_mistake_costs_nothing(tmp_path):
    def killed_once(model, x, y):
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            dies(model, x, y)
        return x + 0

    assert accuracy({"one": killed_once}).content["attacks"][0]["outcomes"] == {"not_adversarial": 4}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this")
def test_attacks_share_no_process_and_are_closed_to_each_other_as_is_the_judge(tmp_path):
    dumpable = functools.partial(ctypes.CDLL(None).prctl, 3)

    def states(model, x, y):
        with (tmp_path / "seen").open("a") as file:
            file.write(f"{os.getpid()} {ctypes.CDLL(None).prctl(3)}\n")
        return x

    accuracy({name: as_attack(states, name=name) for name in ("first", "second", "third")})
    processes, closed = zip(*(line.split() for line in (tmp_path / "seen").read_text().splitlines()), strict=True)
    assert len(set(processes)) == 3
    assert str(os.getpid()) not in processes
    assert set(closed) == {"0"}
    before = dumpable()
    with attack_worker(isolate=True):
        assert dumpable() == 0
    assert dumpable() == before


@pytest.mark.exhaustive
def test_a_new_process_takes_the_place_of_a_lost_one_and_of_what_it_was_forked_from(monkeypatch):
    with attack_worker(isolate=True) as worker:
        assert worker is not run_task
        forkserver.ensure_running()
        server, reported = forkserver._forkserver._forkserver_pid, time.monotonic() + 0.4

        def waited(pid, flags, waitpid=os.waitpid):
            """A busy system reports the end of a process after its connections fail."""
            return (0, 0) if pid == server and time.monotonic() < reported else waitpid(pid, flags)

        monkeypatch.setattr(os, "waitpid", waited)
        os.kill(server, signal.SIGKILL)
        result = accuracy(ATTACKS["ours"])
    assert plain(result.content) == plain(accuracy(ATTACKS["ours"], isolate=False).content)


class Mine(nn.Module):
    """A model of a class that only a test module defines, with a tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.inner, self.shift = digits_network(), torch.tensor(0.25)

    def forward(self, x):
        return self.inner(x) + self.shift


def test_models_and_attacks_of_any_kind_travel():
    counted = []
    attack = as_attack(lambda model, x, y: counted.append(len(x)) or x, name="closure")
    result = robust_accuracy(Mine().eval(), [attack, "art:FastGradientMethod"], X, Y, THREAT_MODEL, isolate=True)
    assert result.content["attacks"][0]["outcomes"]["not_adversarial"] == 10
    assert counted == [], "it was run on a copy"


ROUNDED = """
import torch
from robust_ext.demo.network import digits_network

class Quantise(torch.nn.Module):
    def forward(self, x):
        return (x * 8).round() / 8

def make():
    return torch.nn.Sequential(Quantise(), digits_network()).eval()

def attack(model, x, y, epsilon):
    points = x.clone()
    for _ in range(15):
        points.requires_grad_()
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(points), y), points)
        points = (x + (points.detach() + epsilon / 5 * gradient.sign() - x).clamp(-epsilon, epsilon)).clamp(0, 1)
    return points
"""


@pytest.mark.exhaustive
def test_an_attack_that_is_code_is_adapted_in_its_own_process(tmp_path):
    """By a text that names both, and with the options of the command."""
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(ROUNDED)
    text = f"{file}:attack"
    data = ["--model", f"{file}:make", "--data", "digits", "--samples", "12", "--eps", "0.3", "--no-progress"]
    adapted = f"both=robust_ext:AdaptedAttack(attack='{text}', bpda='0', eot=2)"
    more = ["--jobs", "2", "--out", str(out / "a")]
    found = {}
    for folder, given in (
        ("a", ["--attack", f"plain={text}", "--attack", adapted, *more]),
        ("b", ["--attack", f"mine={text}", "--bpda", "0", "--out", str(out / "b")]),
    ):
        done = CliRunner().invoke(cli.app, ["robust-accuracy", *data, *given])
        assert done.exit_code == 0, done.output
        for attack in json.loads((out / folder / "result.json").read_text())["attacks"]:
            found[attack["name"]] = attack["robust_accuracy"][0]["robust_accuracy"], attack["passes"]
    assert [score for score, _ in found.values()] == [pytest.approx(1.0, abs=0.17), 0.0, 0.0]
    assert list(found) == ["plain", "both", "mine through BPDA 0"]
    assert all(passes == found["plain"][1] for _, passes in found.values())
    (stated,) = out.glob("b/**/records.jsonl")
    assert "mine.py" in stated.read_text().splitlines()[0]


@pytest.mark.exhaustive
def test_settings_of_an_attacks_process_stay_there():
    def leaks(model, x, y):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        return x

    def state():
        return (
            *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
            *(torch.are_deterministic_algorithms_enabled(), torch.random.get_rng_state().sum().item()),
        )

    network, before, given, ours = digits_network(), state(), {"batch_size": 2, **PLANTED}, {"ours": ATTACKS["ours"]}
    result = binarization_test(network, {"leaks": leaks, **ours}, X[:4], THREAT_MODEL, isolate=True, **given)
    assert state() == before
    alone = binarization_test(network, ours, X[:4], THREAT_MODEL, **given)
    assert [one["attacks"]["ours"] for one in result.records] == [one["attacks"]["ours"] for one in alone.records]
