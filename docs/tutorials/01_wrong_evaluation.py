# %% [markdown]
# # A wrong evaluation made right in six steps
#
# A published defense, Max-Mahalanobis centres (Pang et al. 2020), trains a network so that its features lie near the
# centre of their class; its logits are minus the squared distances from ten centres. Here a small version of it is
# trained on scikit-learn's digits, and PGD leaves most of its accuracy at a budget that leaves an undefended network
# with next to nothing. Is the network robust, or is the attack weak?
#
# A robust accuracy cannot tell, as it is high in both cases. The [binarization test](../binarization.md) can: it
# replaces the last layer by one in which an adversarial example is known to exist, and counts how often the attack
# finds it.

# %%
import matplotlib.pyplot as plt
import torch

import robust_ext
from robust_ext.casestudies import load_case_study
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

study = load_case_study("mmc")
train, test = load_dataset("digits", split="train"), load_dataset("digits")
defense = study.trained(*train.take(range(len(train))))
inputs, labels = test.take(test.choose(64, seed=0))
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.2)

with torch.no_grad():
    clean = float((defense(inputs).argmax(1) == labels).float().mean())
print(f"clean accuracy {clean:.2f}")
assert clean > 0.85

# %% [markdown]
# ## Step 1: the number
#
# Fifty steps of PGD on the cross-entropy, for the defense and for an ordinary network. An attack is a Foolbox or ART
# object, a function `(model, x, y) -> x_adv`, or a string like this one.

# %%
PGD = "robust_ext:ObjectivePGD(steps=50, rel_step_size=0.1)"


def accuracy_under(attack, model=defense):
    """Robust accuracy; errors on clean inputs count as not robust."""
    result = robust_ext.robust_accuracy(model, attack, inputs, labels, threat_model)
    return result.robust_accuracy(threat_model.epsilon)


undefended = accuracy_under(PGD, digits_network())
claimed = accuracy_under(PGD)
print(f"undefended {undefended:.2f}, defended {claimed:.2f}")
assert undefended < 0.1
assert claimed > 0.5

# %% [markdown]
# More than half of the accuracy is left. In many papers the evaluation would end here.
#
# ## Step 2: the test
#
# Now every sample gets a binary problem of its own, with an adversarial example that was planted.
# `readout="prototypes"` keeps the form of the defense's last layer, distances from centres. The sequential rule stops
# as soon as the verdict is certain: eight samples for a hopeless attack, four times as many for one that finds
# everything.


# %%
def tested(attack):
    """The binarization test of one attack on the defense."""
    settings = {"readout": "prototypes", "sequential": True, "depths": (1,)}
    return robust_ext.binarization_test(defense, {"attack": attack}, inputs, threat_model, **settings)


tests = {"PGD": tested(PGD)}
print(tests["PGD"])
assert tests["PGD"].verdict == "failed"

# %% [markdown]
# PGD misses adversarial examples that are there by construction, in a model that shares all its layers with the defense
# but the last. So step 1 shows nothing about robustness.
#
# ## Step 3: the cause
#
# `diagnose` records what the attack queries, probes the model, compares with other attacks, and tries the remedies.

# %%
diagnosis = robust_ext.diagnose(defense, {"PGD": PGD}, inputs, labels, threat_model, try_remedies=True)
print(diagnosis)
assert diagnosis.likely.code == "saturated_loss"

# %% [markdown]
# Logits are minus squared distances, which lie in the hundreds. The softmax of the label is then exactly 1 in float32,
# the cross-entropy is exactly 0, and so is its gradient: PGD's steps have no direction. That is a fault of the loss,
# not a merit of the network. It can be seen in three lines:

# %%
point = inputs.clone().requires_grad_(True)
torch.nn.functional.cross_entropy(defense(point), labels, reduction="sum").backward()
without_gradient = float((point.grad.flatten(1).abs().amax(1) == 0).float().mean())
print(f"inputs whose gradient is exactly zero: {without_gradient:.2f}")
assert without_gradient > 0.5

# %% [markdown]
# ## Step 4: a first fix, which is not enough
#
# The authors of the defense did not stop at PGD. Their adaptive attack raises the loss that the network was trained
# with: it moves the features away from the centre of the class, which always has a gradient. The number falls a long
# way.

# %%
adaptive = study.weak.attack
accuracy = {"PGD": claimed, "authors'": accuracy_under(adaptive)}
tests["authors'"] = tested(adaptive)
print(tests["authors'"])
assert accuracy["authors'"] < accuracy["PGD"] - 0.3
assert tests["authors'"].verdict == "failed"

# %% [markdown]
# And it fails the test all the same. A lower number is not yet a right one. (The cause that is named is that of the
# model, whose cross-entropy is as flat as before; this attack does not use it. A likely reason for its own failure is
# its aim: the direction that leads away from one centre fastest need not lead towards another.)
#
# ## Step 5: the remedy of the diagnosis
#
# The diagnosis printed a text to run: the same PGD, shown logits that are divided by a constant. No prediction changes,
# but the cross-entropy has a gradient again.

# %%
(remedy,) = [one for one in diagnosis.content["tried"] if one["confirmed"]]
print(remedy["text"])
accuracy["PGD, scaled logits"] = accuracy_under(remedy["text"])
tests["PGD, scaled logits"] = tested(remedy["text"])
print(tests["PGD, scaled logits"])
assert tests["PGD, scaled logits"].verdict == "passed"
assert accuracy["PGD, scaled logits"] < accuracy["authors'"]

# %% [markdown]
# ## Step 6: a loss that cannot saturate
#
# A constant that suits this network may not suit the next one. The difference between the highest other logit and the
# label's has a gradient at any scale; APGD raises it with a step size of its own choice, in twenty steps instead of
# fifty.

# %%
MARGIN = "robust_ext:APGD(steps=20, loss='margin')"
accuracy["APGD, margin"] = accuracy_under(MARGIN)
tests["APGD, margin"] = tested(MARGIN)
print(tests["APGD, margin"])
assert tests["APGD, margin"].verdict == "passed"
assert accuracy["APGD, margin"] < 0.15

# %% [markdown]
# Both attacks pass, they agree, and what is left is close to what is left of an undefended network.

# %%
print(f"claimed {claimed:.2f}, left {min(accuracy.values()):.2f}, undefended {undefended:.2f}")
assert abs(accuracy["APGD, margin"] - accuracy["PGD, scaled logits"]) < 0.1
assert min(accuracy.values()) < undefended + 0.1

# %% [markdown]
# ## The six steps in one figure
#
# Above: robust accuracy, as an evaluation would report it. Below: the test score of the same attack with its 95%
# interval, which shows whether to believe the number above.

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
colours = {"passed": "#2a7f62", "failed": "#b3422f"}
for place, (name, result) in enumerate(tests.items()):
    (entry,) = result.content["attacks"]
    colour = colours[entry["verdict"]]
    above.bar(place, accuracy[name], width=0.6, color=colour)
    above.annotate(f"{accuracy[name]:.0%}", (place, accuracy[name]), ha="center", va="bottom")
    low, high = entry["score_interval"]
    below.plot([place, place], [low, high], color=colour)
    below.plot(place, entry["score"], "o", color=colour)
    below.annotate(entry["verdict"], (place, entry["score"]), xytext=(9, 0), textcoords="offset points", va="center")
above.axhline(undefended, color="grey", linestyle=":", label="undefended network")
above.set(
    ylabel="robust accuracy", ylim=(0, 1), title=f"Max-Mahalanobis centres on digits, linf {threat_model.epsilon}"
)
above.legend(frameon=False)
below.axhline(0.95, color="grey", linestyle="--")
below.set(ylabel="test score", ylim=(-0.1, 1.1), xticks=range(len(tests)), xlim=(-0.5, len(tests) - 0.3))
below.set_xticklabels([f"{step}: {name}" for step, name in zip(("steps 1-3", "4", "5", "6"), tests, strict=True)])

# %% [markdown]
# ## What to take along
#
# - Report the test score of the attack next to each robust accuracy.
# - A failed test has a cause that can be found: run `diagnose` before trying settings.
# - A lower number does not show that an attack is right; passing the test is necessary, though not sufficient.
#
# The other twelve defenses: [case studies](../case_studies.md). All causes: [diagnosis](../diagnosis.md).
