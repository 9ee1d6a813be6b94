"""Adapters of other libraries, installed as ``robust_ext.adapters``; each is found through an entry point."""
