"""The page at `/` and its files, which browsers keep until their content changes."""

from __future__ import annotations

import gzip
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import resources

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchmem.explain.texts.page_table import page_table
from torchmem.exporter.scrapes import accepts_gzip
from torchmem.metrics import colors

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}
_FOREVER = "private, max-age=31536000, immutable"
_INDEX = "index.html"
_FOLDER = b"STATIC"
"""Placeholder in index.html for the folder of the files; its name changes with their content."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page, with and without compression."""

    media_type: str
    plain: bytes
    gzipped: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        """Compress a file; its name determines its type."""
        media_type = mimetypes.guess_type(name)[0] or "text/plain"
        return cls(media_type, content, gzip.compress(content, mtime=0))


@dataclass(frozen=True, slots=True)
class Files:
    """All files of the page by name, and the digest of their content."""

    digest: str
    by_name: Mapping[str, File]


@cache
def files() -> Files:
    """Read the files of the page from the package."""
    static = resources.files(__package__) / "static"
    contents = {item.name: item.read_bytes() for item in static.iterdir() if item.is_file()}
    contents["colors.css"] = colors.css().encode()
    contents["messages.json"] = page_table()
    digest = blake2b(digest_size=8)
    for name in sorted(contents):
        digest.update(name.encode() + b"\0" + contents[name])
    folder = f"static/{digest.hexdigest()}".encode()
    contents[_INDEX] = contents[_INDEX].replace(_FOLDER, folder)
    by_name = {name: File.of(name, content) for name, content in contents.items()}
    return Files(digest.hexdigest(), by_name)


async def page(request: Request) -> Response:
    """Answer `/`."""
    etag = f'"{files().digest}"'
    headers = PAGE_HEADERS | {"Cache-Control": "no-cache", "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return _answer(request, files().by_name[_INDEX], headers)


async def static_file(request: Request) -> Response:
    """Answer /static/DIGEST/NAME; 404 for files of another version."""
    known, name = files(), request.path_params["name"]
    if request.path_params["digest"] != known.digest or name not in known.by_name:
        return PlainTextResponse("Not found: reload the page.\n", 404)
    return _answer(request, known.by_name[name], PAGE_HEADERS | {"Cache-Control": _FOREVER})


def _answer(request: Request, file: File, headers: Mapping[str, str]) -> Response:
    gzipped = accepts_gzip(request.headers.get("accept-encoding", ""))
    coding = {"Content-Encoding": "gzip"} if gzipped else {}
    body = file.gzipped if gzipped else file.plain
    return Response(body, headers={**headers, **coding}, media_type=file.media_type)
