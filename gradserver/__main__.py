"""``python -m gradserver`` is the same as ``gradserver``."""

import sys

from gradserver.cli import main

sys.exit(main())
