"""`python -m tidelog`: the command line, for where no script is on the path."""

from __future__ import annotations

import sys

from tidelog.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
