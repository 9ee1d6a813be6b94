"""Evaluations: whether robustness claims can be trusted, and why not."""
