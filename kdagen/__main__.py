"""`python -m kdagen` is the same as `kdagen`."""

import sys

from kdagen.cli import main

sys.exit(main())
