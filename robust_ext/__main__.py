"""``python -m robust_ext``, and the program ``robust-ext``."""

import sys


def main() -> None:
    """Run the command line; without typer, end with status 2 and the command that installs it."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        line = f"error: the command line needs {error.name}, which is not installed: pip install 'robust-ext[cli]'"
        print(line, file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    from robust_ext.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
