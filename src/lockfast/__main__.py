"""`python -m lockfast` is the `lockfast` command."""

from __future__ import annotations

import sys

from lockfast.cli.main import main

sys.exit(main())
