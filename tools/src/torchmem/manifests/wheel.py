"""The wheel of the installed torchmem, made again from its files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from importlib.metadata import Distribution, PackagePath

from torchmem.sample.errors import UsageError

# What an installer adds to the files of a wheel.
_INSTALLED = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json"}


def rebuilt(distribution: Distribution) -> tuple[str, bytes]:
    """Return name and content of the wheel of an installed distribution.

    Format: PyPA's "Binary distribution format". Raises UsageError without a list of its files.
    """
    files = [file for file in distribution.files or [] if _is_packed(file)]
    info = next((file.parent for file in files if file.name == "WHEEL"), None)
    if info is None:
        raise UsageError(
            "cannot make the wheel for the image, because the list of torchmem's files is missing: "
            "install torchmem with pip."
        )
    contents = {file.as_posix(): file.read_binary() for file in files}
    contents[f"{info}/RECORD"] = _record(contents, f"{info}/RECORD")
    tag = next(
        line.partition(":")[2].strip()
        for line in contents[f"{info}/WHEEL"].decode().splitlines()
        if line.startswith("Tag:")
    )
    return f"{info.name.removesuffix('.dist-info')}-{tag}.whl", _zipped(contents)


def _is_packed(file: PackagePath) -> bool:
    """Return whether a file comes from the wheel: no script, bytecode or note of the installer."""
    return (
        ".." not in file.parts
        and file.suffix != ".pyc"
        and not (file.parent.suffix == ".dist-info" and file.name in _INSTALLED)
    )


def _record(contents: dict[str, bytes], name: str) -> bytes:
    text = io.StringIO()
    rows = ([path, _digest(content), len(content)] for path, content in contents.items())
    csv.writer(text, lineterminator="\n").writerows([*rows, [name, "", ""]])
    return text.getvalue().encode()


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def _zipped(contents: dict[str, bytes]) -> bytes:
    """Return a zip archive, which is the same for the same files."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as wheel:
        for path, content in sorted(contents.items()):
            # Unlike a plain name, a ZipInfo has no time of today: it is of 1980-01-01.
            wheel.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
