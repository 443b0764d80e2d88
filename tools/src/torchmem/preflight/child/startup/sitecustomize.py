"""Run by Python at startup: `torchmem preflight` puts this folder first on PYTHONPATH.

Every Python that the script starts runs this file, even one that is too old for torchmem.
"""

import os
import sys

# Without this folder and this module, Python finds the environment's own sitecustomize, if any.
HERE = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
sys.path[:] = [entry for entry in sys.path if entry != HERE]
sys.path_importer_cache.pop(HERE, None)
itself = sys.modules.pop("sitecustomize")

try:
    from torchmem.preflight.child.hook import install

    install()
except Exception:  # noqa: BLE001, S110 - the parent sees that there is no report
    pass
finally:
    __import__("sitecustomize")
