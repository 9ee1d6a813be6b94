"""Claims, and texts to paste: what they say, and that Foolbox and ART run the code."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.core.statistics import proportion_interval
from robust_ext.evaluations.evaluate.publish import (
    claim_sentence,
    host_code,
    judge_claim,
    latex_row,
    markdown_row,
    publishable,
)
from tests.evaluations import small
from tests.reports.results import make_evaluation

# Per cent claimed, samples that stand, of how many; and what becomes of it with a certificate.
CLAIMS = [
    (60.0, 0, 128, "refuted"), (60.0, 77, 128, "consistent"), (60.0, 110, 128, "exceeded"),
    (0.0, 0, 128, "consistent"), (0.0, 10, 128, "exceeded"), (100.0, 128, 128, "consistent"),
    (97.4, 0, 1, "consistent"), (2.4, 1, 1, "exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("claimed", "stand", "samples", "certified"), CLAIMS)
def test_what_becomes_of_a_claim(claimed, stand, samples, certified):
    worst = {"interval": list(proportion_interval(stand, samples))}
    assert judge_claim(claimed, worst, certified=True) == certified
    # Without a certificate only a low number says something.
    assert judge_claim(claimed, worst, certified=False) == ("refuted" if certified == "refuted" else "not supported")


@given(st.data())
def test_a_claim_is_refuted_where_so_few_would_stand_by_chance(data):
    """With the claimed robust accuracy, at most so many stand in at most 2.5% of draws: Clopper and Pearson's rule."""
    samples = data.draw(st.integers(1, 300))
    stand, claimed = data.draw(st.integers(0, samples)), data.draw(st.floats(0, 100))
    chance = binom.cdf(stand, samples, claimed / 100)
    if abs(chance - 0.025) < 1e-6:
        return
    worst = {"interval": list(proportion_interval(stand, samples))}
    for certified in (True, False):
        assert (judge_claim(claimed, worst, certified=certified) == "refuted") == (chance < 0.025)


def test_without_a_certificate_no_text_says_that_one_passed():
    certificate = {"attack": "APGD-CE", "certified": False, "words": "not certified: it finds 1 of 64"}
    content = make_evaluation("APGD-CE")
    assert "passes" in claim_sentence(content)
    content |= {"certificate": {**content["certificate"], **certificate}}
    for outcome in ("refuted", "not supported"):
        sentence = claim_sentence({**content, "claim": {"claimed": 60.0, "outcome": outcome}})
        assert outcome in sentence
        assert "passes" not in sentence + publishable(content)


def test_rows_are_escaped():
    model = "a|b_c & 50% {x} #1 \\ ~^$"
    content = make_evaluation("APGD-CE") | {"settings": {"budget": "quick", "model_origin": model}}
    header, line, row = markdown_row(content).splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", one)) for one in (header, line, row)]
    assert cells == [7, 7, 7]
    comment, row = latex_row(content).splitlines()
    assert comment.startswith("% model & threat model")
    assert len(re.findall(r"(?<!\\)&", row)) == comment.count("&") == 5
    assert row.startswith(
        r"a\textbar{}b\_c \& 50\% \{x\} \#1 \textbackslash{} \textasciitilde{}\textasciicircum{}\$ & $"
    )
    assert r"$\ell_\infty$, $\epsilon = 8/255$" in row


ATTACKS = {
    "linf": "robust_ext:APGD(steps=9, loss='margin', stop_early=True)",
    "l2": "robust_ext:APGD(steps=9, loss='targeted-margin', target_classes=2)",
    "l1": "robust_ext:APGD(steps=9)",
    "square": "robust_ext:Square(queries=40)",
    "boundary": "robust_ext:BoundarySearch(budget=60)",
    "objective": "robust_ext:ObjectivePGD(steps=9, start='input')",
}
EPSILONS = {"linf": 0.15, "l2": 0.6, "l1": 3.0}


@pytest.mark.parametrize("view", [{}, {"bpda": "0"}, {"bpda": "0", "gradient_mode": "straight_through"}])
@pytest.mark.parametrize("name", ATTACKS)
def test_foolbox_and_art_run_the_code(name, view):
    """Each piece runs as it is printed, on a network of the user's, and leaves adversarial examples in the ball."""
    pytest.importorskip("foolbox")
    pytest.importorskip("art")
    norm = name if name in EPSILONS else "linf"
    ball = ThreatModel(norm=norm, epsilon=EPSILONS[norm])
    model = nn.Sequential(Rounded() if view else nn.Identity(), *small.NETWORK).eval()
    labels = model(small.INPUTS).argmax(1)
    attack = robust_ext.as_attack(ATTACKS[name])
    code = host_code(robust_ext.AdaptedAttack(attack=attack, **view) if view else attack, ball)
    assert code.keys() == {"foolbox", "art"}
    broken = {}
    for library, lines in code.items():
        given = {"model": model, "inputs": small.INPUTS, "labels": labels}
        exec(compile(lines, library, "exec"), given)  # noqa: S102
        found = torch.as_tensor(given["candidates"])
        step = (found - small.INPUTS).flatten(1)
        length = step.norm(dim=1, p={"linf": torch.inf, "l2": 2, "l1": 1}[norm])
        wrong = model(found).argmax(1) != labels
        inside = length <= ball.epsilon * 1.001
        broken[library] = int((wrong & inside).sum())
    assert min(broken.values()) >= (1 if name == "square" and view else 4), (broken, code)


class Rounded(nn.Module):
    def forward(self, x):
        return (x * 15).round() / 15
