"""The adapters of a clone, whose folder lies next to this package; an installation has it inside, and takes that."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[1] / "adapters")]
