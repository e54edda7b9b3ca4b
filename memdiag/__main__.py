"""``python -m memdiag``: the same as ``memdiag``."""

import sys

from memdiag.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
