"""The patches for the host libraries are well formed; `upstream/check` runs their tests on a checkout of the host."""

import re

import pytest

from tests.test_readme import ROOT

PATCHES = sorted((ROOT / "upstream").glob("*/*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_has_a_message_and_a_test(patch):
    text = patch.read_text()
    headers, body = text.split("\n---\n", 1)[0].split("\n\n", 1)
    subject = re.search(r"^Subject: \[PATCH\] (.+)$", headers, re.MULTILINE)
    assert subject is not None
    assert len(subject[1]) <= 72
    assert re.fullmatch(r"\d\d-[a-z0-9-]+", patch.stem)
    assert len(body.split()) >= 40
    assert "Evidence:" in body
    assert "Tests:" in body
    touched = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    assert any(name.rpartition("/")[2].startswith("test_") for name in touched)
    assert any(not name.startswith("tests/") for name in touched)


def test_stand_in_the_table():
    page = (ROOT / "docs" / "upstream.md").read_text()
    missing = [path.stem for path in PATCHES if path.stem not in page]
    assert PATCHES
    assert not missing
