"""`python -m kvloop` is the `kvloop` command."""

import sys

from kvloop.cli import main

if __name__ == "__main__":
    sys.exit(main())
