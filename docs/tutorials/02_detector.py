# %% [markdown]
# # A detector, and attacks that know it
#
# A detector rejects inputs that look adversarial. Shown attacks that were made without it, nearly every detector looks
# good; what counts are attacks that fool the classifier and the detector at once. This tutorial takes a published
# detector, measures it under a blind attack, tests whether that attack could have found what is there, and repeats both
# with attacks that know the detector.
#
# ## The detector
#
# Trapdoors (Shan et al. 2020): the network is trained to react to one secret trigger per class. Attacks are drawn
# towards these shortcuts, and an input whose features resemble those of a trigger is rejected. Here a small version for
# digits, with a threshold that rejects 5% of clean inputs.

# %%
import matplotlib.pyplot as plt

import robust_ext
from robust_ext.casestudies import load_case_study
from robust_ext.datasets import load_dataset

study = load_case_study("trapdoor")
train, test = load_dataset("digits", split="train"), load_dataset("digits")
train_inputs, train_labels = train.take(range(600))
network = study.trained(train_inputs, train_labels)
detector = study.detector(network, train_inputs, train_labels, seed=0)

rows = test.choose(364, seed=0)
inputs, labels = test.take(rows[:64])
calibration, _ = test.take(rows[64:])
print(detector.calibrate(calibration, false_positive_rate=0.05))

# %% [markdown]
# ## A blind attack
#
# PGD on the classifier alone. `mead` runs attacks, verifies what they find, and has detectors score it. AUROC is the
# probability that an adversarial example scores higher than a clean input: 0.5 is guessing.

# %%
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
BLIND = "robust_ext:ObjectivePGD(steps=100, rel_step_size=0.08)"


def detection(attacks):
    """How the detector fares under each attack, by name."""
    arms = [robust_ext.Arm(attack=attack, epsilon=0.1, label=name) for name, attack in attacks.items()]
    result = robust_ext.mead(
        network, arms, inputs, labels, threat_model, detectors={"trapdoor": detector}, detector_data=calibration
    )
    entries = result.detectors["trapdoor"]["arms"]
    return {entry["arm"].partition(" linf")[0]: entry for entry in entries}


arms = detection({"PGD": BLIND})
seen = arms["PGD"]
print(
    f"PGD fools the network on {seen['positives']} of {len(inputs)} inputs; AUROC of the detector {seen['auroc']:.2f}"
)
assert seen["positives"] == len(inputs)
assert seen["auroc"] > 0.75

# %% [markdown]
# The network has no robustness left, but the detector ranks most of what PGD finds above clean inputs. If PGD were all
# that an attacker can do, the detector would be of use.
#
# ## Could the attack have done better?
#
# For a classifier with a detector, the binarization test has two parts. In the *regular* one, the planted examples pass
# the detector. In the *inverted* one, the detector's decision is turned around: only what it would reject is accepted.
# An attack that ignores the detector ends up on the same side of it in both, and so must fail one of them.


# %%
def tested(attack):
    """The binarization test of an attack on classifier and detector."""
    return robust_ext.binarization_test(
        study.parts(network),
        {"attack": attack},
        inputs,
        threat_model,
        detector=detector,
        detector_data=calibration,
        sequential=True,
        depths=(1,),
        **study.settings,
    )


blind_test = tested(BLIND)
print(blind_test)
assert blind_test.verdict == "failed"
(entry,) = blind_test.content["attacks"]
assert entry["tests"]["inverted"]["verdict"] == "failed"

# %% [markdown]
# It fails, so the numbers above show nothing about attackers who know the detector.
#
# ## Attacks that know it
#
# - *Orthogonal PGD* (Bryniarski et al. 2021) follows the gradient of the classifier or of the detector, whichever is
#   not fooled yet, and takes out of it what would undo the other.
# - *Feature matching* moves the features to those of a clean input of another class, so that there is nothing to
#   detect.
# - *Logit matching* does the same to the logits.
#
# `slipped` counts adversarial examples that the detector misses.

# %%
AWARE = {
    "OrthogonalPGD": "robust_ext:OrthogonalPGD(steps=100)",
    "FeatureMatching": "robust_ext:FeatureMatching(steps=100)",
    "LogitMatching": "robust_ext:LogitMatching(steps=100, samples=1)",
}
arms = detection({"PGD": BLIND, **AWARE})
print("attack            adversarial  of which slip by  AUROC")
for name, entry in arms.items():
    print(f"{name:<16}{entry['positives']:>13}{entry['slipped']:>18}{entry['auroc']:>7.2f}")
best = max(AWARE, key=lambda name: arms[name]["slipped"])
assert best == "OrthogonalPGD"
assert arms[best]["slipped"] > arms["PGD"]["slipped"]
assert arms[best]["auroc"] < 0.5

# %% [markdown]
# Orthogonal PGD slips by on every input it attacks, and its examples score *lower* than clean inputs: an AUROC below
# one half. Logit matching finds fewer examples than blind PGD: knowing the detector does not make an attack strong,
# which is why the list has several, and why the test has to be made again.

# %%
assert arms["LogitMatching"]["slipped"] < arms["PGD"]["slipped"]
aware_test = tested(AWARE["OrthogonalPGD"])
print(aware_test)
assert aware_test.verdict == "passed"

# %% [markdown]
# Orthogonal PGD passes both parts. Its result is the one to report: with this detector or without it, nothing is left.

# %%
worst = 1 - arms["OrthogonalPGD"]["slipped"] / len(inputs)
claimed = 1 - arms["PGD"]["slipped"] / len(inputs)
print(f"robust with the detector: under PGD {claimed:.2f}, under OrthogonalPGD {worst:.2f}")
assert worst < 0.05

# %% [markdown]
# ## The figure
#
# Left: how well the detector separates each attack's examples from clean inputs; one half is guessing. Right: the
# outcomes of the 64 inputs under each attack.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for place, entry in enumerate(arms.values()):
    left.barh(place, entry["auroc"], color="#3b6ea5")
    left.plot(entry["auroc_interval"], [place, place], color="black", linewidth=1)
left.axvline(0.5, color="grey", linestyle=":")
left.set(yticks=range(len(arms)), yticklabels=list(arms), xlabel="AUROC", xlim=(0, 1), title="The detector")
left.invert_yaxis()
fates = {"slips by": "#b3422f", "is rejected": "#d9a441", "no adversarial example": "#2a7f62"}
for place, entry in enumerate(arms.values()):
    parts = (entry["slipped"], entry["positives"] - entry["slipped"], len(inputs) - entry["positives"])
    start = 0
    for part, (fate, colour) in zip(parts, fates.items(), strict=True):
        right.barh(place, part, left=start, color=colour, label=fate if place == 0 else None)
        start += part
right.set(yticks=range(len(arms)), yticklabels=list(arms), xlabel="inputs", title="The attacks")
right.invert_yaxis()
figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)

# %% [markdown]
# ## What to take along
#
# - A detector's AUROC under attacks that ignore it measures how well it sees those attacks, and no more.
# - Test the attack with the detector and the model: regular and inverted.
# - Run several attacks that know the detector; they fail in different ways.
#
# More: [binarization test with a detector](../binarization_detectors.md), [MEAD](../mead.md).
