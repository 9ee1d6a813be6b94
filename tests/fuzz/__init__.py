"""Bad inputs, through the command line and the API: none ends in a traceback, hangs, or is accepted without a meaning.

python -m tests.fuzz --cases 10000 --seed 0
"""
