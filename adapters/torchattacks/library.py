"""torchattacks, imported in one place."""

from __future__ import annotations

import importlib
from typing import Any

# Its requirements (torchvision, requests, torch pins) are not imported by it; its attacks need torch, numpy and scipy.
torchattacks: Any = importlib.import_module("torchattacks")
