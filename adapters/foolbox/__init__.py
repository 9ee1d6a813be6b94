"""Foolbox attacks and models. Importing this imports no Foolbox; using it does."""

from robust_ext.adapters.host import HostAdapter

ADAPTER = HostAdapter("foolbox", title="Foolbox", install='"robust-ext[foolbox]"', parts=("model",))
