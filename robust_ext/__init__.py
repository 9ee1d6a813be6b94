"""Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch."""

import logging

from robust_ext._version import __version__ as __version__
from robust_ext.threat import ThreatModel as ThreatModel

logging.getLogger(__name__).addHandler(logging.NullHandler())
