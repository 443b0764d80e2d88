"""Files that a command writes for the user, who may have changed earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmem.manifests import shipped
from torchmem.output.terminal import first_of
from torchmem.sample.errors import UsageError

_EXECUTABLE = 0o111
_NAMED = 3


def read(paths: Mapping[str, str]) -> dict[str, bytes]:
    """Return the content of shipped files by the names in `paths`; values are their paths."""
    folder = shipped.root()
    return {name: (folder / path).read_bytes() for name, path in paths.items()}


def write(folder: Path, files: Mapping[str, bytes], *, force: bool) -> list[str]:
    """Write files by their paths below `folder`; return the paths of those that were replaced.

    Raises UsageError, and writes nothing, if a file has other content and `force` is not set.
    """
    try:
        changed = [name for name, content in files.items() if _differs(folder / name, content)]
        if changed and not force:
            raise UsageError(
                f"{first_of(changed, _NAMED)} in {folder} would be replaced by other content: save "
                "your changes and add --force, or give another --out."
            )
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}): give another --out."
        ) from error
    return changed


def keep_executable(folder: Path, paths: list[str]) -> None:
    """Make the files that are programs in the checkout executable."""
    for path in paths:
        if (shipped.root() / path).stat().st_mode & _EXECUTABLE:
            (folder / path).chmod((folder / path).stat().st_mode | _EXECUTABLE)


def report(folder: Path, count: int, replaced: list[str]) -> None:
    """Print how many files were written, and which of them had other content."""
    where = "this folder" if folder == Path() else folder
    print(f"Wrote {count} files to {where}.")
    if replaced:
        print(f"Replaced: {', '.join(replaced)}.")


def _differs(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() != content
