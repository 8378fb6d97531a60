"""`python -m megatron_hybrid`: the command line."""

import sys

from megatron_hybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
