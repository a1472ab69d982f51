"""`python -m mainspring`: the same as the command `mainspring`."""

import sys

from mainspring.cli import main

sys.exit(main())
