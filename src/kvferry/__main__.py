"""``python -m kvferry`` is the command ``kvferry``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The command. What it needs is imported here, so that Ctrl-C meanwhile is one line too."""
    try:
        from kvferry.cli import main as run  # noqa: PLC0415 - see above

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kvferry: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
