"""ECOC: words and decoder against closed forms."""

import pytest
import torch

from robust_ext.attacks.apgd import APGD
from robust_ext.casestudies.ecoc import BITS, Decoder, ThroughCorrelations, code_words, decoded
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


def test_words_are_far_apart():
    words = code_words(10, generator=torch.Generator().manual_seed(0))
    assert words.shape == (10, BITS)
    for first in range(10):
        for second in range(first):
            # Rows of a Hadamard matrix differ in half of the bits; the column that changes its sign moves that by one.
            assert abs(int((words[first] != words[second]).sum()) - BITS // 2) <= 1


def test_the_decoder_by_a_loop():
    torch.manual_seed(0)
    decoder = Decoder(3).requires_grad_(False)
    decoder.words = code_words(3, generator=torch.Generator().manual_seed(1))
    features = torch.randn(5, BITS, 64)
    found = decoder(features)
    for row in range(5):
        bits = [float(features[row, bit] @ decoder.weight[bit] + decoder.bias[bit]) for bit in range(BITS)]
        for label in range(3):
            correlation = sum(torch.tensor(bits).tanh() * decoder.words[label])
            expected = torch.log(correlation.clamp_min(0) + 1e-6)
            assert torch.allclose(found[row, label], expected, atol=1e-3)


@pytest.mark.parametrize(("correlation", "flat"), [(17.0, True), (16.0, False)])
def test_beyond_a_correlation_of_16_8_the_cross_entropy_has_no_gradient(correlation, flat):
    bits = torch.full((1, BITS), correlation / BITS).atanh().requires_grad_(True)
    words = torch.stack([torch.ones(BITS), -torch.ones(BITS)])
    torch.nn.functional.cross_entropy(decoded(bits, words), torch.tensor([0])).backward()
    assert bool((bits.grad == 0).all()) is flat


def test_an_attack_through_correlations_leaves_the_decoder_as_it_is():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Unflatten(1, (BITS, 64)), Decoder(3)).eval()
    module[1].words = code_words(3, generator=torch.Generator().manual_seed(1))
    x = torch.rand(4, BITS * 64)
    before = module(x)
    target = Target(module=module, bounds=(0.0, 1.0), classes=3, input_shape=(BITS * 64,), device=torch.device("cpu"))
    attack = ThroughCorrelations(attack=APGD(steps=5, loss="margin"))
    given = {"threat_model": ThreatModel(norm="linf", epsilon=0.1), "generator": torch.Generator().manual_seed(0)}
    found = attack.search(target, x, before.argmax(1), **given)
    assert torch.equal(module(x), before)
    assert not module[1].linear
    # Linear in the bits: the attack reaches the corner that the margin of two words points to.
    assert bool((module(found).argmax(1) != before.argmax(1)).any())
