"""`python -m disagg` is `disagg`."""

import sys

from disagg.cli.main import main

sys.exit(main())
