"""Run by Python at startup: `torchmem preflight` puts this folder first on PYTHONPATH."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [entry for entry in sys.path if entry != HERE]

# Run the sitecustomize.py of the environment, which this file hides.
hidden = PathFinder.find_spec("sitecustomize", sys.path)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))

try:
    from torchmem.preflight.child.hook import install
except ImportError:
    pass  # an interpreter without torchmem; the parent sees that there is no report
else:
    install()
