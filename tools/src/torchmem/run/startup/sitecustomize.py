"""Run by Python at startup: `torchmem run` puts this folder first on PYTHONPATH.

Every Python that a job starts runs this file, even one that is too old for torchmem.
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
