"""Findings in words: sentences, lines to paste, what is left out."""

import pytest

from robust_ext.core.finding_texts import leading, lines, sentence, shared, subject
from robust_ext.evaluations.causes.finding import Finding, Remedy


def plain(**values):
    return Finding(**{"code": "unmoved", "cause": "It stays.", **values}).to_dict()


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        ({"evidence": ("First.", "Second.")}, "It stays. First."),
        ({"samples": 3, "of": 4, "evidence": ("In 3 of 4 samples",)}, "It stays. In 3 of 4 samples."),
        ({"layer": "net.0", "samples": 0, "of": 4}, "It stays (0 of 4 samples, layer net.0)."),
        ({"cause": "net.0 stays.", "layer": "net.0"}, "net.0 stays."),
    ],
)
def test_a_sentence_has_the_first_evidence_and_names_nothing_twice(finding, words):
    assert sentence(plain(**finding)) == words


def test_what_leads_and_who_shares_it():
    """The first of weight of each attack, and all about the model; attacks with one cause in one sentence."""
    found = [
        plain(code="zero_gradient", layer="0"),
        *(plain(code="zero_gradient", layer="0", attack=name, cause=f"As of {name}.") for name in "abcd"),
        plain(code="flat_loss", attack="a"),
        plain(code="flat_loss", attack="e"),
        plain(code="no_gradient", attack="f"),
    ]
    assert [one["attack"] for one in leading(found)] == [None, "a", "b", "c", "d", "e"]
    groups = [(subject(names), finding["cause"]) for finding, names in shared(leading(found))]
    assert groups == [("a, b, c and 1 more", "As of a."), ("e", "It stays.")]
    assert shared(found[:1]) == [(found[0], [])]
    assert subject([]) == "The model"


def test_lines_to_paste_are_whole_and_those_for_the_inside_of_an_attack_are_comments():
    paste, code = f"--attack {'long' * 60}", "for step in steps:\n    go()\x1b[31m"
    assert lines([plain(attack="a", remedies=(Remedy(words="Go on.", paste=paste, code=code),))]) == [
        "Warning: a: It stays.",
        "  Remedy: Go on.",
        f"    {paste}",
        "    # In your own code:",
        "    #     for step in steps:",
        "    #         go()\\x1b[31m",
    ]
    assert lines([plain(code="no_gradient")]) == []
