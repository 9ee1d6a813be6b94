"""Evaluations: what tells whether a robustness evaluation can be trusted."""
