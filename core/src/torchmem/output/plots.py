"""What all plots share: colors, style, and how they are written. Needs the extra `plot`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.sample.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# Distinguishable with any kind of color blindness, and in grayscale.
RESERVED, ALLOCATED, STRANDED, LIMIT, GOOD = "#bcd4ea", "#2b6ca3", "#f28e2b", "#a01c1c", "#1a7f37"
DOTS_PER_INCH = 110


def check(path: Path, command: str) -> None:
    """Check that `torchmem COMMAND --plot` can write a plot, before the work for it is done.

    Raises:
        UsageError: the suffix or the directory cannot be used.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401, ICN001 - only to see whether it is installed
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{command} --plot", error.name or "", "plot") from error
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--plot draws png and svg: name a file that ends in .png or .svg, not {path.name!r}."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no directory {path.parent}; create it first.")


def style() -> AbstractContextManager[None]:
    """Return the style of all plots; equal data produce equal files."""
    import matplotlib as mpl

    return mpl.rc_context({"svg.hashsalt": "torchmem", "font.size": 9})


def save(figure: Figure, path: Path) -> None:
    """Write a figure. Raise UsageError if the file cannot be written."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file with --plot."
        ) from None
