"""Attacks of adv-lib (adversarial-library). Importing this imports no adv-lib; using it does."""

from robust_ext.adapters.host import HostAdapter

ADAPTER = HostAdapter(name="adv_lib", title="adv-lib", package="adv_lib", install="--no-deps adv-lib")
