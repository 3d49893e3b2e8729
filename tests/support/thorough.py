"""Whether tests look at as many cases as they can, or at as many as a quick run allows.

GRAFTUNE_EXAMPLES=1000 looks further. Few cases are enough to notice a mistake; the full numbers are for the figures
that documents and comments quote.
"""

from __future__ import annotations

import os

THOROUGH = int(os.environ.get("GRAFTUNE_EXAMPLES", "25")) >= 1000
