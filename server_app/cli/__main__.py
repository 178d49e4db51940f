"""``python -m fedsilo.server_app.cli``: the ``fedsilo`` command of this checkout."""

import sys

from fedsilo.server_app.cli.main import main

sys.exit(main())
