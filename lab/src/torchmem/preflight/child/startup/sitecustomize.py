"""Run by Python at startup: `torchmem preflight` puts this folder first on PYTHONPATH.

Every Python that the script starts runs this file, even one that is too old for torchmem.
"""

import os
import sys


# An agent may run this file in a module of its own, so these are the only names in it.
def torchmem_startup():
    # type: () -> None
    """Do this file's work, and then run the environment's own sitecustomize, if any."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    try:
        from torchmem.preflight.child.hook import install

        install()
    except Exception:  # noqa: BLE001, S110 - the parent sees that there is no report
        pass
    finally:
        torchmem_hands_on()


def torchmem_hands_on():
    # type: () -> None
    """Run the next sitecustomize on sys.path in the way in which this one was run."""
    spec = globals().get("__spec__")  # Python 2 has none
    if spec is None or getattr(spec, "_initializing", False):  # by `import sitecustomize`
        itself = sys.modules.pop("sitecustomize")  # noqa: F841 - Python 2 would clear its globals
        __import__("sitecustomize")
        return
    # The loader that an agent, such as New Relic's, calls runs this file in the agent's module,
    # which must stay in sys.modules.
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None:
        globals().update(__spec__=spec, __loader__=spec.loader, __file__=spec.origin)
        code = spec.loader.get_code("sitecustomize")  # type: ignore[union-attr]
        exec(code, globals())  # noqa: S102


torchmem_startup()
