"""Entry point of the `evenpack` command and of `python -m evenpack`."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    from evenpack.cli.main import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
