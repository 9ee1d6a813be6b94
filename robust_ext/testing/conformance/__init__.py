"""The conformance matrix: every attack of every library on a binarized target and on an ordinary classifier."""

from robust_ext.testing.conformance.matrix import TARGETS as TARGETS
from robust_ext.testing.conformance.matrix import Row as Row
from robust_ext.testing.conformance.matrix import conformance as conformance
from robust_ext.testing.conformance.matrix import conformance_row as conformance_row
