"""The how-tos: their Python runs, and prints what is shown."""

import re
from pathlib import Path

import pytest

from robust_ext.cli import app as cli

HOWTO = Path(__file__).parents[1] / "docs" / "howto"
TEXT = {page.stem: page.read_text(encoding="utf-8") for page in sorted(HOWTO.glob("*.md"))}
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)
RUN = [name for name, text in TEXT.items() if BLOCK.search(text)]


def test_every_page_is_in_the_table():
    listed = set(re.findall(r"\((\w+)\.md\)", TEXT["README"]))
    assert listed == {*TEXT} - {"README"}
    assert {*RUN} >= {"logits_in_a_dict", "inconclusive", "attack_for_a_detector", "resume", "add_an_attack", "compare"}


@pytest.mark.parametrize("name", RUN)
def test_the_lines_run(name, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": name}
    for code, shown in BLOCK.findall(TEXT[name]):
        exec(compile(code, f"{name}.md", "exec"), names)  # noqa: S102 - our own pages
        assert capsys.readouterr().out.startswith(shown)
    if name == "pytest":
        names["test_my_attack"](request.getfixturevalue("attack_test"))
    if name == "attack_for_a_detector":
        scores = {attack["name"]: attack["score"] for attack in names["result"].content["attacks"]}
        aware, blind = scores.values()
        assert aware > blind


def test_commands_have_options_that_exist():
    """Of each command, with its continued lines."""
    from typer.main import get_command

    commands = get_command(cli.app).commands
    for text in TEXT.values():
        for name, rest in re.findall(r"robust-ext ([a-z-]+)((?:[^\n\\]|\\\n)*)", "\n".join(BASH.findall(text))):
            known = {option for one in commands[name].params for option in one.opts}
            assert {*re.findall(r"(?<= )--[a-z-]+", rest)} <= known, f"robust-ext {name}{rest}"
