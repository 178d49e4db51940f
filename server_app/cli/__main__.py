"""``python -m server_app.cli``: the ``fedsilo`` command of this checkout."""

import sys

from server_app.cli.main import main

sys.exit(main())
