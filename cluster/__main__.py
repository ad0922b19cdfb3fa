"""`python -m cluster` is `baton`."""

import sys

from cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
