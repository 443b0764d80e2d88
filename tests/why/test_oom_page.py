"""`torchmem why --html`: one page in one file, whatever the report says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from support.maps import USED, device_of, map_of, varied_segments
from support.reports import CAPACITY, NOW, STRANDED, reports
from support.snapshots import segment
from support.words import oom_html, oom_text

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.oom_report import OomReport, decode, encode
from torchmem.pages.page import MAX_PAGE_BYTES
from torchmem.sample.memory_map import MAP_SUFFIX, MemoryMap
from torchmem.sample.memory_map import encode as encode_map
from torchmem.sample.run_history import RunHistory

HISTORY = RunHistory(
    steps=(1, 2, 4, 8),
    seconds=(0.0, 0.5, 1.5, 3.5),
    allocated_bytes=(GIB, 2 * GIB, 4 * GIB, 8 * GIB),
    peak_bytes=(2 * GIB, 3 * GIB, 5 * GIB, 9 * GIB),
    stranded_bytes=(None, 0, MIB, GIB),
    outside_bytes=(None, None, GIB, GIB),
    kept_bytes=(None,) * 4,
)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the content of each kind of element."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements = list[tuple[str, dict[str, str | None]]]()
        self.content = dict[str, list[str]]()
        self._open = ""
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._open = tag
        self.content.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.content[self._open][-1] += data

    @property
    def device(self) -> dict[str, Any]:
        """What the page's code draws about the device."""
        found: dict[str, Any] = json.loads(self.content["script"][0])["devices"][0]
        return found


def oom(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "why", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
        capture_output=True,
        timeout=60,
        check=False,
    )


def with_history(report: OomReport, history: RunHistory | None) -> OomReport:
    """Return a report with another history of the run."""
    return replace(report, device=replace(report.device, run_history=history))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A report with a history, and a map of the same moment beside it."""
    path = tmp_path / "1-2-3-1.oom.json"
    path.write_bytes(encode(with_history(STRANDED, HISTORY)))
    put_map(path, map_of(varied_segments(), timestamp=NOW))
    return path


def put_map(report: Path, content: MemoryMap) -> None:
    """Write the map of the process that wrote a report."""
    report.with_name(f"1-2-3{MAP_SUFFIX}").write_bytes(encode_map(content))


def test_the_page_is_beside_the_text(tmp_path: Path, source: Path) -> None:
    """`--html FILE` writes the page, says so, and prints the text, which the page has, too."""
    file = tmp_path / "oom.html"
    done = oom(source, "--html", file)
    written = Page(file.read_bytes())

    assert (done.returncode, done.stderr.decode()) == (0, f"torchmem: {file} written.\n")
    assert done.stdout == oom(source).stdout
    assert written.content["pre"] == [done.stdout.decode()]
    assert [entry.name for entry in tmp_path.glob("*oom.html*")] == ["oom.html"]


def test_the_page_on_stdout(source: Path) -> None:
    """`--html -` prints the page alone."""
    done = oom(source, "--html", "-")

    assert done.stdout.startswith(b"<!doctype html>")
    assert done.stdout.endswith(b"</html>\n")


def test_a_file_is_replaced(tmp_path: Path, source: Path) -> None:
    """An older page is replaced, also behind a link, and its mode is that of a new file."""
    file, link = tmp_path / "old.html", tmp_path / "link.html"
    file.write_text("old")
    link.symlink_to(file)
    assert oom(source, "--html", link).returncode == 0

    assert link.is_symlink()
    assert b"<!doctype" in file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--html", "FILE"), b"name a file that ends in .html"),
        (("--html", "DIR/page.html"), b"cannot be written (No such file or directory)"),
        (("--html", "RUN/directory.html"), b"cannot be written (it is a directory)"),
        (("--list", "--html", "RUN/page.html"), b"--html shows one report"),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, source: Path, arguments: tuple[str, ...], sentence: bytes
) -> None:
    """A page that cannot be written exits with 2, and a report is never overwritten."""
    (tmp_path / "directory.html").mkdir()
    before = source.read_bytes()
    names = {"FILE": str(source), "DIR": str(tmp_path / "no"), "RUN": str(tmp_path)}
    given = [re.sub("FILE|DIR|RUN", lambda match: names[match[0]], word) for word in arguments]
    done = oom(*([] if "--list" in given else [source]), *given)

    assert (done.returncode, done.stdout) == (2, b"")
    assert sentence in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert before == source.read_bytes()


def test_the_page_loads_nothing(source: Path) -> None:
    """No element names another file, and the policy allows its own script and style alone."""
    content = oom_html(source, decode(source.read_bytes()))
    found = Page(content)
    policy = next(values["content"] for tag, values in found.elements if "http-equiv" in values)
    code, style = re.findall(r"'sha256-([^']*)'", policy or "")

    assert [
        tag for tag, values in found.elements if {"src", "href", "onclick"} & values.keys()
    ] == []
    assert b"url(" not in content
    assert "default-src 'none'; " in str(policy)
    assert "unsafe" not in str(policy)
    assert digest(found.content["script"][1]) == code
    assert digest(found.content["style"][0]) == style
    assert "Permission is hereby granted" in found.content["script"][1]


def digest(text: str) -> str:
    """Return the hash that the policy names."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_chart_is_of_the_whole_run(source: Path) -> None:
    """The chart has the history, with the OOM in the step that failed as its last point."""
    report = decode(source.read_bytes())
    chart = Page(oom_html(source, report)).device["chart"]
    values = {line["label"]: line["values"] for line in chart["lines"]}

    assert (chart["unit"], chart["x"]) == ("steps", [1, 2, 4, 8, 391])
    assert values["stranded"] == [None, 0, MIB, GIB, 14 * GIB]
    assert values["peak so far"] == [2 * GIB, 3 * GIB, 5 * GIB, 9 * GIB, 62 * GIB]
    assert (chart["total"], chart["oom"]) == (80 * GIB, True)


@pytest.mark.parametrize(
    ("history", "unit"),
    [
        (replace(HISTORY, steps=(0, 0, 0, 0)), "seconds"),
        (replace(HISTORY, steps=(3, 2, 1, 0)), "before"),
        (replace(HISTORY, steps=(1,)), "before"),
        (RunHistory(), "before"),
        (None, "before"),
    ],
)
def test_the_chart_without_steps(history: RunHistory | None, unit: str) -> None:
    """Without steps it is over seconds; without a usable history it has the minutes before."""
    device = Page(oom_html(Path("report"), with_history(STRANDED, history))).device

    assert unit == device["chart"]["unit"]
    assert sorted(device["chart"]["x"]) == device["chart"]["x"]


def test_no_chart_without_numbers() -> None:
    """A report of a process that was read once has no chart."""
    bare = replace(CAPACITY, trend=replace(CAPACITY.trend, **dict.fromkeys(TREND, ())))
    assert Page(oom_html(Path("report"), with_history(bare, None))).device["chart"] is None


TREND = tuple(CAPACITY.trend.__slots__)


def test_the_map_is_of_the_same_moment(source: Path) -> None:
    """A map of another snapshot of the process is left out, and so is one that is damaged."""
    report = decode(source.read_bytes())
    assert len(Page(oom_html(source, report)).device["map"]["device"]["segments"]) == 5

    put_map(source, map_of(varied_segments(), timestamp=NOW + 1))
    assert Page(oom_html(source, report)).device["map"] is None
    source.with_name(f"1-2-3{MAP_SUFFIX}").write_bytes(b"junk")
    assert Page(oom_html(source, report)).device["map"] is None
    assert Page(oom_html(Path("elsewhere"), report)).device["map"] is None


def test_a_full_map_fits_the_page(source: Path) -> None:
    """With 100,000 blocks the page stays below its limit and shows a thinned map."""
    blocks = [((64 << 10) + 512 * (number % 7), USED) for number in range(500)]
    full = device_of([segment(n << 40, "large", blocks) for n in range(1, 201)], timestamp=NOW)
    put_map(source, MemoryMap(NOW, [full]))
    content = oom_html(source, decode(source.read_bytes()))

    assert len(content) < MAX_PAGE_BYTES
    assert Page(content).device["map"]["device"]["merged_blocks"] > 50_000


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports)
def test_every_report_has_a_page(report: OomReport) -> None:
    """Any report that can be read has a page below the limit, with the elements of every other."""
    read = decode(encode(report))
    content = oom_html(Path("report"), read)
    found = Page(content)

    assert len(content) < MAX_PAGE_BYTES
    assert found.content["script"][1].startswith("/*")
    assert {tag for tag, _ in found.elements} == ELEMENTS
    assert found.content["pre"] == [oom_text(read, Path("report"))]


ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "p", "h1", "ul", "li"),
    *("main", "div", "details", "summary", "pre", "footer", "script"),
}


def test_text_is_no_markup(tmp_path: Path) -> None:
    """Whatever a name, a path or a line contains, it ends no element and begins none."""
    evil = "</script></pre><!--<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    process = replace(
        STRANDED.process, run=evil, script=evil, hostname=evil, versions={"torch": evil}
    )
    found = Page(oom_html(tmp_path / evil, replace(STRANDED, process=process)))

    assert {tag for tag, _ in found.elements} == ELEMENTS
    assert evil in found.content["title"][0]
    assert evil in found.content["pre"][0].replace("\n", " ")
