"""`python -m graftune`: the same as the `graftune` script."""

import sys

from graftune.cli import main

sys.exit(main())
