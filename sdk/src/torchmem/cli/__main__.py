"""`python -m torchmem.cli` is the `torchmem` command."""

import sys

from torchmem.cli.main import main

sys.exit(main())
