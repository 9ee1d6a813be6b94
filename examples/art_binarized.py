"""An ART user: from a PyTorchClassifier to any ART attack on planted adversarial examples, in five lines."""

import torch
from art.attacks.evasion import AutoProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier

from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

digits = load_dataset("digits")
x = digits.take(digits.choose(32, seed=0))[0].numpy()
loss = torch.nn.CrossEntropyLoss()

classifier = PyTorchClassifier(digits_network(), loss=loss, input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1))
binarized = BinarizedPyTorchClassifier.from_classifier(classifier, x, eps=0.1)
attack = AutoProjectedGradientDescent(binarized, eps=0.1, eps_step=0.1, max_iter=40, verbose=False)
x_adv = attack.generate(binarized.x, binarized.y)
print(f"test score {binarized.score(x_adv):.2f}: the share of planted adversarial examples that were found")
