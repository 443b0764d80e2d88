"""Run by Python at startup: `torchmem run` puts this folder first on PYTHONPATH.

Every Python that a job starts runs this file, even one that is too old for torchmem.
"""

import os
import sys

# Without this folder and this module, Python finds the environment's own sitecustomize, if any.
HERE = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
sys.path[:] = [entry for entry in sys.path if entry != HERE]
sys.path_importer_cache.pop(HERE, None)
itself = sys.modules.pop("sitecustomize")

try:
    # With torchmem in the environment of the program, torchmem-autostart.pth has done this.
    if "torchmem" not in sys.modules:
        from torchmem.run.autostart import install

        install()
except ImportError:
    pass  # an environment without torchmem
except Exception as error:  # noqa: BLE001 - the program must start
    if sys.version_info >= (3, 10) and sys.stderr is not None:
        sys.stderr.write("torchmem: this process is not monitored: %r\n" % error)  # noqa: UP031
finally:
    __import__("sitecustomize")
