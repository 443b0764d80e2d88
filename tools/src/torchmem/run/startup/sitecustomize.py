"""Run by Python at startup: `torchmem run` puts this folder first on PYTHONPATH."""

import sys
from importlib.machinery import PathFinder

# Without this folder, the environment's own sitecustomize.py is found, which this file hides.
HERE = __file__.rpartition("/")[0]
sys.path[:] = [entry for entry in sys.path if entry != HERE]
hidden = PathFinder.find_spec("sitecustomize", sys.path)

try:
    from torchmem.run.autostart import install
except ImportError:
    pass  # an environment without torchmem
else:
    install()

if hidden is not None and hidden.loader is not None:
    from importlib.util import module_from_spec

    module = sys.modules["sitecustomize"] = module_from_spec(hidden)
    hidden.loader.exec_module(module)
