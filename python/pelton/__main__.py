"""`python -m pelton`: the same as the command `pelton`."""

from __future__ import annotations

import sys

from pelton.cli import main

if __name__ == "__main__":
    sys.exit(main())
