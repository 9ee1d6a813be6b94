"""A study is a command in a file: it goes there and back unchanged, and is refused as the command line refuses."""

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from robust_ext.cli import app as cli
from robust_ext.cli.run import Study, printed_back, read_study, study_arguments
from robust_ext.core.errors import DataError, RobustExtError

GROUP = typer.main.get_command(cli.app)
COMMANDS = {name: command for name, command in GROUP.commands.items() if name != "run"}
ODD = 'a "b" \\ c\'s\n#[x]=\t\x1b[31m\x9b é 漢 \U0001f600'
APGD = "robust_ext:APGD(steps=2)"
SMALL = {"model": "digits", "data": "digits", "samples": 3, "eps": 0.1, "progress": False, "in-process": True}
SMALL |= {"attack": APGD}


def keys(command):
    return {one.opts[0].lstrip("-"): one for one in COMMANDS[command].params if one.name != "help_all"}


def other(parameter):
    words = [parameter.opts[0]] if parameter.opts[0].startswith("-") else []
    if getattr(parameter, "is_flag", False):
        return [parameter.secondary_opts[0] if parameter.default is True else parameter.opts[0]]
    kind = parameter.type_descriptor.annotation
    if kind in (int, float):
        return [*words, "7" if kind is int else "1e-05"]
    values = [ODD, "-1,2", "8/255"] if getattr(parameter, "multiple", False) or parameter.nargs != 1 else [ODD]
    return [f"{words[0]}={value}" for value in values] if words else ["--", *values]


def parsed(command, arguments):
    with COMMANDS[command].make_context(command, list(arguments)) as context:
        return context


def texts(context):
    return {key: str(value) if isinstance(value, Path) else value for key, value in context.params.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_all_options_go_into_a_study_and_back(command, tmp_path):
    found = [other(parameter) for parameter in keys(command).values()]
    found.sort(key=lambda words: words[0] == "--")
    words = [word for words in found for word in words]
    # One "--" stands before all that has no name.
    given = parsed(command, [word for place, word in enumerate(words) if word != "--" or place == words.index("--")])
    given.params["out"] = tmp_path
    with printed_back(given):
        pass
    again = read_study(tmp_path / "study.toml", COMMANDS)
    assert again.command == command
    # What is done to a run folder is no part of what repeats it.
    assert set(again.options) == set(keys(command)) - {"repair"}
    expected = {**texts(given), **({"repair": False} if "repair" in given.params else {})}
    # In whatever order a file has them.
    again = Study(command, dict(reversed(again.options.items())))
    back = texts(parsed(command, study_arguments(again, COMMANDS[command].params)))
    assert {**expected, "out": 0} == {**back, "out": 0}
    assert (tmp_path / "study.toml").read_text().replace("\n", "").isprintable()


def write(folder, command, **values):
    file = folder / "mine.toml"
    rows = [f"{key} = {str(one).lower() if isinstance(one, bool) else repr(one)}" for key, one in values.items()]
    file.write_text("\n".join([f"[{command}]", *rows]))
    return file


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_a_study_runs_and_its_folder_repeats_it(tmp_path):
    file = write(tmp_path, "robust-accuracy", **SMALL)
    done = invoke("run", file, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert f"robust-ext run {tmp_path / 'run' / 'study.toml'} repeats it." in done.output
    (records,) = (tmp_path / "run").rglob("records.jsonl")
    before = records.read_bytes()
    again = invoke("run", tmp_path / "run" / "study.toml")
    assert again.exit_code == 0, again.output
    assert records.read_bytes() == before
    shown = invoke("run", file)
    assert "worst case" in shown.stdout
    assert "[robust-accuracy]" not in shown.stdout
    (tmp_path / "printed.toml").write_text(shown.stderr)
    assert read_study(tmp_path / "printed.toml", COMMANDS).options["eps"] == "0.1"


WRONG = [
    *({"eps": "eight"}, {"samples": 0}, {"attack": ["a:b", [1]]}, {"progress": "no"}, {"smaples": 3}),
    *("[mead]\n[diagnose]", "[binarisation]", "[mead", "[attacks]\nseed = 1979-05-27"),
]


def test_what_is_no_study_and_wrong_values_name_file_and_key(tmp_path):
    for values in WRONG:
        file = write(tmp_path, "robust-accuracy", **{**SMALL, **(values if isinstance(values, dict) else {})})
        if isinstance(values, str):
            file.write_text(values)
        error = invoke("run", file).exception
        assert isinstance(error, RobustExtError)
        key = f": [robust-accuracy] {next(iter(values))}: got " if isinstance(values, dict) else ""
        assert str(error).startswith(f"{file}{key}")
    assert isinstance(invoke("run", tmp_path / "none.toml").exception, DataError)


HARM = "open('harm', 'w').close()\ndef attack(model, x, y): return x\ndef make(classifier=None): return classifier\n"
INSIDE = 'robust_ext:AdaptedAttack(attack="theirs.py:attack", eot=2)'
ARM = {"detector": "nss", "arm": "linf:0.1=theirs.py:attack"}
CODE = [
    ("robust-accuracy", {"model": "theirs.py:make"}),
    ("robust-accuracy", {"attack": "theirs.py:attack"}),
    ("robust-accuracy", {"attack": "theirs:attack"}),
    ("robust-accuracy", {"attack": INSIDE}),
    ("robust-accuracy", {"attack": "theirs.py:attack", "in-process": False}),
    ("binarization", {"detector": "theirs.py:make"}),
    ("binarization", {"readout": "theirs.py:make"}),
    ("test-time", {"defense": "theirs.py:make"}),
    ("test-time", {"defense": "bit-depth", "surrogate": "theirs.py:make"}),
    ("mead", ARM),
    # A study does not allow itself to.
    ("mead", {**ARM, "allow-code": True}),
    # Nor does it name a cluster, or write anywhere else than in the folder that it lies in.
    ("robust-accuracy", {"executor": "dask:tcp://198.51.100.1:8786"}),
    ("robust-accuracy", {"executor": "theirs.py:make"}),
    ("robust-accuracy", {"out": "/tmp/theirs"}),
    ("robust-accuracy", {"out": "../theirs"}),
    ("demo", {"out": "/tmp/theirs"}),
    ("attacks", {"json": "/tmp/theirs"}),
    ("attacks", {"markdown": "runs/../../theirs"}),
]


@pytest.mark.parametrize(("command", "values"), CODE)
def test_a_study_runs_no_code_that_it_names_and_writes_nowhere_else(command, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(HARM)
    left_out = {"mead": ("eps", "attack"), "test-time": ("attack",), "demo": SMALL, "attacks": SMALL}.get(command, ())
    small = {key: value for key, value in SMALL.items() if key not in left_out}
    error = invoke("run", write(tmp_path, command, **{**small, **values})).exception
    assert isinstance(error, RobustExtError), error
    assert f"mine.toml: [{command}] " in str(error)
    assert "if you trust the study, robust-ext run --allow-code" in str(error)
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.toml", "theirs.py", "__pycache__"}


def test_a_study_that_is_trusted_names_a_cluster_and_writes_elsewhere(tmp_path):
    (tmp_path / "study").mkdir()
    file = write(tmp_path / "study", "robust-accuracy", **SMALL, out=str(tmp_path / "elsewhere"))
    done = invoke("run", file, "--allow-code")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "elsewhere" / "result.json").exists()
    file = write(tmp_path, "robust-accuracy", **SMALL, executor="none.py:make")
    assert "executor: got none.py, expected an existing" in str(invoke("run", file, "--allow-code").exception)
