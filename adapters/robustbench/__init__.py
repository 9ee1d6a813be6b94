"""Models of RobustBench. Importing this imports no RobustBench; using it does."""

from robust_ext.adapters.host import ModelAdapter

ADAPTER = ModelAdapter(
    name="robustbench",
    title="RobustBench",
    package="robustbench",
    install="git+https://github.com/RobustBench/robustbench.git",
)
