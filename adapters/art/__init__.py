"""Attacks and classifiers of the Adversarial Robustness Toolbox. Importing this imports no ART; using it does."""

from robust_ext.adapters.host import HostAdapter

ADAPTER = HostAdapter("art", title="ART", install='"robust-ext[art]"', parts=("model", "detector"))
