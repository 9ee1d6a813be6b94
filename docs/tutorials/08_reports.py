# %% [markdown]
# # A gallery of reports
#
# Every result saves itself as one page of HTML that needs no other file: the verdict with its reason, plots, tables and
# the settings that repeat the run ([what such a page holds](../reports.md)). Each cell here runs one evaluation on the
# embedded digits network and saves its report; on the documentation site all of them stand at the end of this page.

# %%
import matplotlib.pyplot as plt

import robust_ext
from robust_ext import fit_detector
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

network, threat_model = digits_network(), robust_ext.ThreatModel(norm="linf", epsilon=0.1)
train, test = load_dataset("digits", split="train"), load_dataset("digits")
inputs, labels = test.take(range(40))

# %% [markdown]
# ## The binarization test
#
# Two recipes, of which one takes steps that are too small. The page shows the planted points, each attack's candidates
# instead, and why the weak one failed.

# %%
recipes = {
    "APGD": "robust_ext:APGD(steps=20, loss='margin')",
    "tiny steps": "foolbox:LinfPGD(steps=20, rel_stepsize=0.001)",
}
tested = robust_ext.binarization_test(network, recipes, inputs, threat_model)
tested.save("binarization-test")
verdicts = [attack["verdict"] for attack in tested.content["attacks"]]
assert verdicts == ["passed", "failed"], verdicts

# %% [markdown]
# ## A diagnosis
#
# The weak recipe again: its causes with their evidence, and remedies that are ready to run.

# %%
diagnosis = robust_ext.diagnose(network, recipes["tiny steps"], inputs, labels, threat_model)
diagnosis.save("diagnosis")
assert diagnosis.likely is not None
print(diagnosis.likely.code)

# %% [markdown]
# ## Robust accuracy
#
# The worst case over attacks at three budgets.

# %%
attacks = {"APGD": "robust_ext:APGD(steps=20)", "Square": "robust_ext:Square(queries=100)"}
accuracy = robust_ext.robust_accuracy(network, attacks, inputs, labels, threat_model, epsilons=(0.02, 0.05, 0.1))
accuracy.save("robust-accuracy")

# %% [markdown]
# ## Detectors against many attacks
#
# Two detectors under three attacks at once.

# %%
detectors = {name: fit_detector(name, network, *train.take(range(400))) for name in ("fs", "kd-bu")}
arms = [
    robust_ext.Arm(attack=attack, epsilon=0.1, label=name)
    for name, attack in {**attacks, "one step": "robust_ext:ObjectivePGD(algorithm='fgsm')"}.items()
]
mead = robust_ext.mead(
    network, arms, inputs, labels, threat_model, detectors=detectors, detector_data=test.take(range(100, 200))[0]
)
mead.save("mead")

# %% [markdown]
# ## A defense at test time
#
# The anti-adversary, under the cascade of attacks that begins with cheap ones.

# %%
settings = {"classifier": network, "steps": 10, "queries": 50}
defended = robust_ext.evaluate_defense("anti-adversary", None, inputs, labels, threat_model, **settings)
defended.save("test-time-defense")
print(defended)

# %% [markdown]
# ## In a notebook
#
# A result shows itself as a table, and draws the plots of its page with `plot`.

# %%
accuracy.plot()
plt.show()

# %% [markdown]
# `robust-ext show FOLDER` prints a saved result, and `robust-ext compare` shows what differs between two
# ([results](../results.md)).
