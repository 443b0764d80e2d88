"""Run by Python at startup: a phantom run puts this folder first on PYTHONPATH.

The phantom GPU's library is built for one PyTorch. A wrapper (a shell, uv, conda) can start a
Python with another one. This restarts such a process with the library for its own PyTorch, before
it has run anything. Then it installs what measures the program, if PHANTOM_HOOK names a module for
that. It runs in every Python of the run, also in those without torchmem, and in those that are too
old for it.
"""

import os
import sys


def has_other_torch(built_for):
    # type: (str) -> bool
    """Return whether this Python has another CUDA build of PyTorch than the library is for."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("torch")
    folders = list((spec and spec.submodule_search_locations) or [])
    if not folders or folders[0] == built_for:
        return False
    return os.path.exists(os.path.join(folders[0], "lib", "libtorch_cuda.so"))  # noqa: PTH110, PTH118


def restart():
    # type: () -> None
    """Replace this process by a phantom run of its own command, on the GPU of this run."""
    parent = os.environ["PHANTOM_PYTHON"]
    del os.environ["PHANTOM_TORCH"]  # so that no other Python on the way restarts
    command = [parent, "-m", "torchmem.phantom", "--", sys.executable]
    command.extend(sys.orig_argv[1:])
    os.execv(parent, command)  # noqa: S606 - without a shell on purpose


# An agent may run this file in a module of its own, so these are the only names in it.
def torchmem_startup():
    # type: () -> None
    """Do this file's work, and then run the environment's own sitecustomize, if any."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    try:
        if (
            hasattr(sys, "orig_argv")  # Python 3.10
            and "libphantom.so" in os.environ.get("LD_PRELOAD", "")
            and "PHANTOM_TORCH" in os.environ
            and os.path.samefile("/proc/self/exe", sys.executable)  # noqa: PTH121
            and has_other_torch(os.environ["PHANTOM_TORCH"])
        ):
            restart()
    except Exception:  # noqa: BLE001, S110 - the program must start
        pass
    try:
        if "PHANTOM_HOOK" in os.environ:
            __import__(os.environ["PHANTOM_HOOK"])  # importlib would stay in sys.modules
            sys.modules[os.environ["PHANTOM_HOOK"]].install()
    except Exception:  # noqa: BLE001, S110 - what started the program sees that nothing is measured
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
