"""The program `edgelm`: from a start that may be interrupted at once to an exit code."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit: 0, 1 (failed, one line says why), 2 (wrong usage), 130 (interrupted)."""
    try:
        from edgelm.cli import run_cli  # Ctrl-C during this import is an interrupt like any other

        code = run_cli()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
