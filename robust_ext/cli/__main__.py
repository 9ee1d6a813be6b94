"""``python -m robust_ext.cli``."""

from robust_ext.cli.app import main

if __name__ == "__main__":
    main()
