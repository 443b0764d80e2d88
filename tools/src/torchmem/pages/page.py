"""A page in one file, with the live page's code: it opens from disk and needs no network.

The content of a report is untrusted. It becomes text: escaped in the markup, or JSON that the
page's code reads. A page without code is drawn as SVG. The policy of the page allows only its own
script and styles, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

from torchmem.metrics import colors
from torchmem.pages import memory_map
from torchmem.pages.script import script
from torchmem.sample.memory_map import DeviceMap

MAX_PAGE_BYTES = 300_000
"""The largest page: tickets and mail accept it."""

_PACKAGE = "torchmem.exporter.live"
"""Has the page's files. They need neither the exporter's extra nor its code."""
_STYLES = ("uplot.css", "page.css", "memory_map.css", "report_page.css")
_ENTRY = "report_page.js"
_MAP_ROOM_BYTES = 500
"""Of the title of a map, and what stands around it."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="torchmem {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="report">
<header class="report-top">
<p class="state" data-state="{state}">{kind}</p>
<h1>{headline}</h1>
<ul class="report-about">{about}</ul>
</header>
<main>
{drawn}
<details id="text" class="card" open>
<summary>The same as text</summary>
<pre tabindex="0">{text}</pre>
</details>
</main>
<footer>Written by torchmem {version}. This page is complete: it loads nothing.</footer>
{scripts}</body>
</html>
"""
_SCRIPTS = """\
<script type="application/json" id="document">{document}</script>
<script>{script}</script>
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """What a page is about: its title, its kind, the process's state, and the headline.

    `about` says which process it was, one line each.
    """

    title: str
    kind: str
    state: str
    headline: str
    about: Sequence[str]


def filled(
    heading: Heading,
    text: str,
    devices: Sequence[dict[str, Any]],
    maps: Sequence[DeviceMap | None],
) -> bytes:
    """Return the page of some devices with as much of their memory maps as has room.

    The text under `map` in a device is the title of its map. See `render` for `text`.
    """
    plain = [{**device, "map": None} for device in devices]
    room = MAX_PAGE_BYTES - len(render(heading, text, {"devices": plain}))
    share = room // max(1, len(maps)) - _MAP_ROOM_BYTES
    drawn = [
        {**device, "map": _map(device["map"], mapped, share)}
        for device, mapped in zip(devices, maps, strict=True)
    ]
    return render(heading, text, {"devices": drawn})


def _map(title: str, mapped: DeviceMap | None, max_bytes: int) -> dict[str, Any] | None:
    document = memory_map.drawn(mapped, max_bytes) if mapped else None
    return {"title": title, "device": document} if document else None


def render(heading: Heading, text: str, document: Mapping[str, Any]) -> bytes:
    """Return the page.

    `document` is what the page's code draws (report_page.js), and `text` says the same for readers
    without JavaScript, or to copy.
    """
    code = _code()
    scripts = _SCRIPTS.format(document=embedded(document), script=code)
    content = _Content('<div id="drawn"></div>', _styles(), scripts, _hash(code))
    return _page(heading, text, content)


def still(heading: Heading, text: str, drawn: str, styles: str) -> bytes:
    """Return a page that needs no script: `drawn` is its markup, `styles` what it adds to CSS."""
    return _page(heading, text, _Content(drawn, f"{_styles()}{styles}"))


@dataclass(frozen=True, slots=True)
class _Content:
    """The markup of a page's main part, its styles, and the scripts that its policy allows."""

    drawn: str
    styles: str
    scripts: str = ""
    allowed: str = "'none'"


def _page(heading: Heading, text: str, content: _Content) -> bytes:
    policy = (
        f"default-src 'none'; script-src {content.allowed}; style-src {_hash(content.styles)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy,
        version=html.escape(version("torchmem")),
        title=html.escape(heading.title),
        style=content.styles,
        state=html.escape(heading.state),
        kind=html.escape(heading.kind),
        headline=html.escape(heading.headline),
        about="".join(map(_item, heading.about)),
        drawn=content.drawn,
        text=html.escape(text),
        scripts=content.scripts,
    ).encode(errors="replace")


def _item(line: str) -> str:
    return f"<li>{html.escape(line.replace('  ', ' · '))}</li>"


def embedded(document: Mapping[str, Any]) -> str:
    """Return a document as JSON that can stand in a script element: it has no markup."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _styles() -> str:
    sheets = [colors.css(), *map(_read, _STYLES)]
    return re.sub(r"\n+", "\n", "\n".join(sheets))


@cache
def _code() -> str:
    """Return uPlot with its license, and the page's modules."""
    terms = _read("uplot-license.txt")
    return f"/*\n{terms}*/\n{_read('uplot.js')}\n{script(_read, _ENTRY)}"


def _read(name: str) -> str:
    return (resources.files(_PACKAGE) / "static" / name).read_text("utf-8")
