"""Modules, code and settings of the process as they were before something untrusted ran, compared and put back."""
