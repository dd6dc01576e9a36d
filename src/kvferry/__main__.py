"""``python -m kvferry`` is the command ``kvferry``."""

from __future__ import annotations

from kvferry.cli import main

if __name__ == "__main__":
    main()
