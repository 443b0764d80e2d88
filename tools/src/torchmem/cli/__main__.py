"""Run the `torchmem` command: `python -m torchmem.cli`."""

from __future__ import annotations

import sys

from torchmem.cli.main import main

sys.exit(main())
