"""Blocks of runs on the workers of any ``concurrent.futures.Executor``; this process decides, and writes."""
