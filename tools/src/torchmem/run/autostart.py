"""Calls `sdk.instrument()` once the program has imported torch. Imported with TORCHMEM=1.

    sitecustomize or torchmem-autostart.pth -> install() -> (the program imports torch)
    -> _instrument(), which does nothing more until the program initializes CUDA

It is not called from CUDA's initialization, during which PyTorch holds a lock that `instrument()`
needs too. An error here is one line on stderr and never reaches the program.
"""

from __future__ import annotations

import os
import sys

from torchmem.startup.torch_import import after_torch_import

VARIABLE = "TORCHMEM"
ON = "1"

_installed = False


def install() -> None:
    """Prepare this process if TORCHMEM is 1; a second call does nothing."""
    global _installed  # noqa: PLW0603 - one process, one hook
    if os.environ.get(VARIABLE) == ON and not _installed:
        _installed = True
        after_torch_import(_instrument)


def _instrument() -> None:
    extension = getattr(sys.modules.get("torch"), "_C", None)
    if not hasattr(extension, "_cuda_init"):
        return  # another module of this name, or a build without CUDA
    try:
        from torchmem import sdk
        from torchmem.run import closing_lines

        value = os.environ.get(closing_lines.VARIABLE)
        if value:
            closing_lines.register(value)
        sdk.instrument().provisional = True
    except Exception as error:  # noqa: BLE001 - the program must not notice
        if sys.stderr is not None:  # to None, print() writes on stdout
            print(f"torchmem: this process is not monitored: {error}", file=sys.stderr)
