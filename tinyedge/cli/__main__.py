"""``python -m tinyedge.cli``: the same as the command ``tinyedge``."""

import sys

from . import main

sys.exit(main())
