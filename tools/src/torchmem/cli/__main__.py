"""`python -m torchmem.cli` is the `torchmem` command."""

from __future__ import annotations

import sys

from torchmem.cli.main import main

sys.exit(main())
