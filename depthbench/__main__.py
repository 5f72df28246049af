"""``python -m depthbench``."""

import sys

from depthbench.cli import main

if __name__ == "__main__":  # data loader processes import this module too
    sys.exit(main())
