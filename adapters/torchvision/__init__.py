"""Models of torchvision. Importing this imports no torchvision; using it does."""

from robust_ext.adapters.host import ModelAdapter

ADAPTER = ModelAdapter(name="torchvision", title="torchvision", package="torchvision", install="torchvision")
