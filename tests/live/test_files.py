"""Files on the page in a real Chromium: read in the browser, and refused if they are hostile."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import reports, whatif_results
from support.browser import Page
from support.fuzz import TEXTS_FILE, make_input
from support.played_script import PlayedScript
from support.recordings import RecordedJob, varying_lengths
from support.snapshots import REAL_GPUS, load_snapshot, of_real_gpu, segments
from support.waiting import until
from support.words import oom_text

from torchmem import trace as recordings
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.cli.main import command_line
from torchmem.commands.preflight import run as run_preflight
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.explain.oom_report import encode
from torchmem.explain.texts.formats import BY_NAME
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.page import files
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.node.why import oom_why
from torchmem.whatif.engine import what_if
from torchmem.whatif.result import document
from torchmem.why.text import explain_stream

INPUT = "input[type=file]"
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 52), 1 << 52)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=5)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterServer]:
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path_factory.mktemp("run")))
    with closing(exporter), closing(serve(exporter)) as running:
        yield running


@pytest.fixture
def opened(page: Page, server: ExporterServer) -> Page:
    """The page, which has no rank."""
    page.goto(server.url)
    page.wait("document.getElementById('connection').dataset.connected === 'true'")
    return page


def module(name: str) -> str:
    """Return an expression for a module of the page."""
    return f"import('/static/{files().digest}/{name}')"


def unpickled(page: Page, contents: list[bytes]) -> list[Any]:
    """Return what the page's reader makes of pickles: the value as JSON, or its error."""
    encoded = json.dumps([base64.b64encode(content).decode() for content in contents])
    found: list[Any] = page.evaluate(
        f"{module('pickle.js')}.then(({{ unpickle, PickleError }}) => {encoded}.map((text) => {{"
        "const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));"
        "try { return { value: JSON.stringify(unpickle(bytes.buffer)) }; } catch (error) {"
        "if (!(error instanceof PickleError)) return { bug: String(error.stack) };"
        "return { refused: error.message }; } }))"
    )
    return found


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(values, min_size=10, max_size=10), st.integers(2, 5))
def test_plain_values_are_read(opened: Page, drawn: list[Any], protocol: int) -> None:
    """What Python pickles is what the page reads, in every protocol that PyTorch's tools write."""
    found = unpickled(opened, [pickle.dumps(value, protocol) for value in drawn])
    for value, read in zip(drawn, found, strict=True):
        written = json.loads(json.dumps(value), parse_int=float)
        assert json.loads(read["value"], parse_int=float) == written


class Evil:
    """Runs a command when a pickle with it is loaded by Python."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("owned",)


def test_hostile_pickles_are_refused(opened: Page) -> None:
    """Classes, prototypes, damage and noise give one sentence, and nothing else is thrown."""
    hostile = [make_input(3, "snapshot", number) for number in range(300)]
    crafted = [
        pickle.dumps(Evil()),
        pickle.dumps({"segments": [{1, 2}]}),
        pickle.dumps({"__proto__": {"polluted": True}}),
        pickle.dumps({"segments": []})[:-3],
        b"\x80\x04(((((((.",
        b"\x80\x04]\x94h\x05.",
        b"\x80\x09N.",
        b"",
        b"{}",
    ]
    found = unpickled(opened, [*crafted, *hostile])
    assert [read for read in found if "bug" in read] == []
    for read in found[: len(crafted)]:
        assert read["refused"].endswith(".")
    assert opened.evaluate("({}).polluted === undefined")


def choose(page: Page, path: Path) -> None:
    """Open a file, and wait until it is shown or refused."""
    page.choose(INPUT, path)
    page.wait(
        "(() => { const s = document.querySelector('.file-section');"
        "const m = s?.querySelector('.map-message'); return m && (m.hidden || "
        "!/^(Reading|Following)/.test(m.textContent)); })()"
    )


def shown(page: Page) -> str:
    """Return the text of the newest file."""
    return str(page.evaluate("document.querySelector('.file-section').innerText"))


def replayed(page: Page, snapshot: Path) -> dict[str, Any]:
    """Return the timeline of a snapshot, and its states at some events, as the page sees them."""
    encoded = base64.b64encode(snapshot.read_bytes()).decode()
    found: dict[str, Any] = page.evaluate(
        f"Promise.all([{module('pickle.js')}, {module('recording.js')}])"
        ".then(([{ unpickle }, { Recording }]) => {"
        f"const bytes = Uint8Array.from(atob('{encoded}'), (c) => c.charCodeAt(0));"
        "const recording = new Recording(unpickle(bytes.buffer), 0);"
        "recording.seek(recording.length); const end = recording.map();"
        "const timeline = recording.timeline(); recording.seek(0); const begin = recording.map();"
        "recording.seek(recording.length); const again = recording.map();"
        "recording.seek(0); const first = recording.map();"
        "return { timeline, end, again, begin, first, length: recording.length }; })"
    )
    return found


def blocks_of(snapshot: dict[str, Any]) -> list[tuple[int, list[tuple[int, str]]]]:
    """Return address and blocks of each segment of a snapshot."""
    letters = {"active_allocated": "a", "active_pending_free": "p", "inactive": "f"}
    found = [
        (
            segment["address"],
            [(block["size"], letters[block["state"]]) for block in segment["blocks"]],
        )
        for segment in snapshot["segments"]
    ]
    return sorted(found)


def blocks_in(device: dict[str, Any]) -> list[tuple[int, list[tuple[int, str]]]]:
    """Return the same of a map."""
    return [
        (segment["address"], list(zip(segment["sizes"], segment["states"], strict=True)))
        for segment in device["segments"]
    ]


def test_a_trace_is_followed_exactly(opened: Page, tmp_path: Path) -> None:
    """From the end to the begin and back, the memory is that of the recording."""
    job = varying_lengths(steps=6)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(job.snapshot()))
    found = replayed(opened, path)

    assert blocks_of(job.snapshot()) == blocks_in(found["end"]) == blocks_in(found["again"])
    assert found["begin"] == found["first"]
    timeline = found["timeline"]
    assert found["length"] == timeline["events"][-1]
    reserved = sum(segment["total_size"] for segment in job.snapshot()["segments"])
    assert reserved == timeline["reserved"][-1]


def _briefly_stranded() -> dict[str, Any]:
    """Return a long trace whose most stranded moment lies beside one with more allocated bytes."""
    job = RecordedJob()
    for size in (*(512 * (1 + number % 9) for number in range(1500)), 100 << 20):
        block = job.alloc(size)
        assert block is not None
        job.free(block)
    for size in (2 << 20, 90 << 20):
        job.alloc(size)
    return job.snapshot()


@pytest.mark.parametrize("name", [*REAL_GPUS, "a long trace"])
def test_the_most_stranded_bytes_are_those_of_a_replay(
    opened: Page, name: str, tmp_path: Path
) -> None:
    """The page says of a trace what `torchmem whatif` says of its recorded settings."""
    path = tmp_path / "snapshot.pickle"
    if name in REAL_GPUS:
        path = of_real_gpu(name, tmp_path)
    else:
        path.write_bytes(pickle.dumps(_briefly_stranded()))
    (recording, *_) = recordings.read(path)
    answer = what_if(recording, settings=())
    found = replayed(opened, path)

    assert answer.outcomes[0].worst_stranded == max(found["timeline"]["stranded"])


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(segments(), min_size=12, max_size=12), st.integers(0, 40 << 20))
def test_sums_over_a_trace_are_those_of_the_sample(
    opened: Page, drawn: list[list[SegmentInfo]], driver_free: int
) -> None:
    """Stranded and releasable bytes, the largest block, and where it is shown, the headroom."""
    given_segments = json.dumps(drawn)
    found = opened.evaluate(
        f"{module('recording.js')}.then(({{ Recording }}) => {given_segments}.map((segments) => {{"
        "const { memory, largePage } = new Recording({ segments }, 0);"
        "const sums = memory.measure(largePage);"
        f"return {{ ...sums, headroom: memory.headroom(sums, {driver_free}) }}; }}))"
    )
    for snapshot, sums in zip(drawn, found, strict=True):
        layout = measure(snapshot, 0, 0.0, AvailableMemory(driver_free))
        assert layout.stranded_bytes == sums["stranded"]
        assert layout.releasable_bytes == sums["releasable"]
        assert layout.largest_free_block_bytes == sums["largest"]
        is_plain = all(
            not segment["is_expandable"]
            and segment["stream"] == 0
            and all(block["state"] != "active_pending_free" for block in segment["blocks"])
            for segment in snapshot
        )
        if is_plain:
            assert layout.headroom_flush_bytes == sums["headroom"]


def _freed_and_allocated(device: list[SegmentInfo]) -> dict[str, Any]:
    """Return a snapshot whose trace frees every block in use, and allocates all of them again."""
    used = []
    for segment in device:
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                used.append({"addr": at, "size": block["size"]})
            at += block["size"]
    freed = [{"action": a, **each} for each in used for a in ("free_requested", "free_completed")]
    return {
        "segments": device,
        "device_traces": [[*freed, *({"action": "alloc", **each} for each in reversed(used))]],
    }


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(segments(), min_size=12, max_size=12))
def test_stranded_bytes_after_each_event(opened: Page, drawn: list[list[SegmentInfo]]) -> None:
    """Counted from event to event, they are those of all segments, expandable or not."""
    recorded = json.dumps([_freed_and_allocated(device) for device in drawn])
    found = opened.evaluate(
        f"{module('recording.js')}.then(({{ Recording }}) => {recorded}.map((snapshot) => {{"
        "const recording = new Recording(snapshot, 0); const { memory, largePage } = recording;"
        "let counted = memory.measure(largePage).stranded; const wrong = [];"
        "while (recording.position < recording.length) {"
        "counted = recording.next(counted);"
        "if (counted !== memory.measure(largePage).stranded) wrong.push(recording.position); }"
        "return wrong; }))"
    )
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.parametrize("name", REAL_GPUS)
def test_recordings_of_real_gpus(opened: Page, name: str, tmp_path: Path) -> None:
    """Undoing and repeating the whole trace ends in the recorded state, block by block."""
    path = of_real_gpu(name, tmp_path)
    found = replayed(opened, path)
    assert blocks_of(load_snapshot(path)) == blocks_in(found["end"]) == blocks_in(found["again"])
    assert found["begin"] == found["first"]


def test_a_snapshot_has_timeline_and_map(opened: Page, tmp_path: Path) -> None:
    """The file is shown in the place of the node, until it is closed; a click goes to a moment."""
    path = tmp_path / "rank3.pickle"
    path.write_bytes(pickle.dumps(varying_lengths(steps=6).snapshot()))
    choose(opened, path)
    assert "rank3.pickle" in shown(opened)
    assert "events" in shown(opened)
    assert "Fragmentation index" in shown(opened)
    assert opened.evaluate("document.getElementById('main').hidden")
    opened.wait("document.querySelectorAll('.file-chart canvas').length === 2")

    before = opened.evaluate("document.querySelector('.map-when').textContent")
    opened.click(".file-chart .u-over")
    opened.wait(f"document.querySelector('.map-when').textContent !== {json.dumps(before)}")
    opened.evaluate("document.querySelector('canvas.map-canvas').focus()")
    opened.press("Home")
    opened.wait("document.querySelector('.map-title')")
    assert opened.axe() == []
    opened.click("role=button[name=Close]")
    assert not opened.evaluate("document.getElementById('main').hidden")


def test_an_oom_report(opened: Page, tmp_path: Path) -> None:
    """It says what `torchmem why` says, in the same words; its chart ends at the OOM."""
    path = tmp_path / "1-2-3-0.oom.json"
    path.write_bytes(encode(reports.STRANDED))
    choose(opened, path)
    opened.wait("document.querySelector('.oom .uplot')")
    words = " ".join(shown(opened).split())
    command = " ".join(oom_text(reports.STRANDED).split())
    said = oom_why(reports.STRANDED, None, may_look=True)
    sentences = (
        said.summary,
        said.reason,
        said.before,
        *(remedy.text for remedy in said.advice),
        *(line.strip() for each in said.listings for line in (each.title, *each.lines)),
        *(f"{fact.subject} {fact.text}" for fact in said.facts),
    )
    for sentence in (" ".join(sentence.split()) for sentence in sentences):
        assert sentence in words
        assert sentence in command
    assert [chart.x[-1] for chart in said.charts] == [0.0]
    assert opened.axe() == []


def test_a_text_is_explained_without_the_exporter(opened: Page, tmp_path: Path) -> None:
    """The page shows a log's rank, cause, numbers and advice, and sends nothing of the log."""
    example = BY_NAME["pytorch"].example
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n[rank3]: {example}\n[rank1]: {BY_NAME['lost_peer'].example}\n")
    choose(opened, path)
    words = " ".join(shown(opened).split())

    assert "rank 3, cuda:0, line 2" in words
    assert "Enough free memory, but not in one piece." in words
    assert "requested 2.0 GiB" in words
    assert "TORCHMEM_CAPTURE_ON_OOM=trace" in words
    assert "A consequence, 1×, from line 3, rank 1" in words
    assert opened.axe() == []


@pytest.mark.parametrize("name", ["2.13, in between", "an absurd size"])
def test_a_text_has_the_advice_of_the_command(opened: Page, tmp_path: Path, name: str) -> None:
    """Where a message leaves several causes, the page has the advice for each."""
    (text,) = (case["text"] for case in _texts() if case["name"] == name)
    path = tmp_path / "train.log"
    path.write_text(text)
    choose(opened, path)
    words = " ".join(shown(opened).split())
    (message,) = explain_stream(io.BytesIO(text.encode())).document()["messages"]

    assert f"{message['headline']}." in words
    assert ("What to do, by cause" in words) == bool(message["candidates"])
    assert message["advice"]
    for each in message["advice"]:
        assert each["text"] in words


def test_the_page_draws_every_text(opened: Page) -> None:
    """Whatever a text of tests/why/texts.yml says, each of its messages has a sentence."""
    texts = [case["text"] for case in _texts()]
    drawn = opened.evaluate(
        f"{module('text_file.js')}.then(async ({{ showText }}) => {{ const all = [];"
        f"for (const text of {json.dumps(texts)}) {{ const section = document.createElement('div');"
        "await showText(section, text); all.push(section.querySelectorAll('.lead').length); }"
        "return all; })"
    )
    ooms = [[each for each in _messages(text) if each["role"] == "oom"] for text in texts]

    assert drawn == [len(found) for found in ooms]


def _texts() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = yaml.safe_load(TEXTS_FILE.read_text())
    return cases


def test_the_page_judges_texts_as_the_command_does(opened: Page) -> None:
    """For each text of tests/why/texts.yml, format, cause, rank, line, count and numbers agree."""
    texts = [case["text"] for case in _texts()]
    found = opened.evaluate(
        f"Promise.all([{module('messages.js')}, fetch('/static/{files().digest}/messages.json')"
        f".then((answer) => answer.json())]).then(([{{ kindsOf }}, table]) => {json.dumps(texts)}"
        ".map((text) => kindsOf(text, table).map((kind) => [kind.line, kind.format.name, "
        "kind.cause, kind.detail, kind.candidates, kind.rank, kind.count, "
        "kind.numbers.requested ?? null, kind.ownPid, kind.others.map(({ pid }) => pid), "
        "kind.compaction])))"
    )
    for text, on_page in zip(texts, found, strict=True):
        expected = map(_as_on_page, _messages(text))
        assert sorted(on_page, key=json.dumps) == sorted(expected, key=json.dumps), text


def _messages(text: str) -> list[dict[str, Any]]:
    document = explain_stream(io.BytesIO(text.encode())).document()
    return [each for each in document["messages"] if each["role"] != "table"]


def _as_on_page(found: dict[str, Any]) -> list[Any]:
    judged = [found[name] for name in ("line", "format", "cause", "detail", "candidates")]
    counted = [found["rank"], found["count"], found["numbers"]["requested"], found["own_pid"]]
    others = [holder["pid"] for holder in found["others"]]
    return [*judged, *counted, others, found["compaction_bytes"]]


def test_an_oom_report_needs_the_exporter(page: Page, tmp_path: Path) -> None:
    """Without an answer, the page says what to run instead."""
    path = tmp_path / "1-2-3-0.oom.json"
    path.write_bytes(encode(reports.STRANDED))
    exporter = Exporter(FakeNvml.of(), RunDirectory(tmp_path / "run"))
    with closing(exporter), closing(serve(exporter)) as server:
        page.goto(server.url)
        page.wait("document.getElementById('connection').textContent === 'live'")
    choose(page, path)
    page.wait("document.querySelector('#files .map-message').textContent.includes('torchmem why')")
    page.problems()


def test_what_if_side_by_side(opened: Page, tmp_path: Path) -> None:
    """Each setting has a row and a chart, all on one scale."""
    path = tmp_path / "whatif.json"
    path.write_text(document(whatif_results.CHANGE))
    choose(opened, path)
    result = whatif_results.CHANGE
    assert result.verdict.sentence in shown(opened)
    for outcome in result.outcomes:
        assert outcome.name in shown(opened)
    drawn = sum(1 for outcome in result.outcomes if len(outcome.timeline) > 1)
    opened.wait(f"document.querySelectorAll('.file-side-by-side canvas').length === {drawn}")


def test_a_preflight_names_its_gpu_and_those_it_compares(
    opened: Page, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The GPU model with its memory, and a row for each model of the comparison, are shown."""
    words = ["preflight", "--beside-gpu", "--gpu-model", "a100-40gb", "--json", "--", "sh", "a.sh"]
    run_preflight(command_line().parse_args(words), PlayedScript(), count(0.0, 1.0).__next__)
    found = json.loads(capfd.readouterr().out)
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(found))
    choose(opened, path)

    assert "a100-40gb 39.4 GiB" in shown(opened)
    compared = [row["gpu_model"]["name"] for row in found["comparison"]["gpu_models"]]
    assert len(compared) > 1
    assert [name for name in compared if f"{name}\t" not in shown(opened)] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Evil()), "never loaded"),
        (pickle.dumps([1, 2]), "not a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": []}), "no memory of any GPU"),
        (b"hello", "No message in this text says that memory ran out"),
        (b'{"a": 1}', "No message in this text says that memory ran out"),
        (b"\x7fELF\0\0", "neither a memory snapshot, nor JSON, nor a text"),
        (b'{"oom": {"cause": "x"}, "process": {"run": 7}, "device": {}}', "not an OOM report"),
        (b'{"verdict": {}, "outcomes": [null, 3, {}]}', "Peak reserved"),
    ],
)
def test_other_files_are_refused(opened: Page, tmp_path: Path, content: bytes, words: str) -> None:
    """With a sentence; the page goes on."""
    path = tmp_path / "file"
    path.write_bytes(content)
    choose(opened, path)
    assert words in shown(opened)


def renderer_bytes(page: Page) -> int:
    """Return the highest resident memory of the browser's renderers so far."""
    peaks = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            command = status.with_name("cmdline").read_bytes()
            if b"--type=renderer" in command and page.is_ancestor_of(int(status.parent.name)):
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                peaks.append(int(fields["VmHWM"].split()[0]) * 1024)
    return max(peaks)


def with_stacks(events: int) -> bytes:
    """Return a snapshot in which almost everything is Python stacks, as with PyTorch's default."""
    frames = [{"name": f"f{i}", "filename": f"/a/{i}.py", "line": i} for i in range(2000)]
    trace = [
        {
            "action": "alloc" if index % 2 == 0 else "free_completed",
            "addr": (1 << 40) + (index // 2 % 64) * 4096,
            "size": 4096,
            "stream": 0,
            "time_us": 10**15 + index,
            "frames": [frames[(index + depth * 7) % 2000] for depth in range(40)],
        }
        for index in range(events)
    ]
    segment = {
        "device": 0, "address": 1 << 40, "total_size": 1 << 21, "segment_type": "small",
        "blocks": [{"size": 1 << 21, "state": "inactive"}],
    }  # fmt: skip
    return pickle.dumps({"segments": [segment], "device_traces": [trace]}, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: b"\x80\x04" + b"]" * (40 << 20) + b".", "more values than this page"),
        (lambda: b"\x80\x04" + b"K\x01" * (20 << 20) + b".", "more values than this page"),
        (lambda: b"\x80\x04" + b"X\x0b\0\0\0hello world0" * (3 << 20) + b".", "damaged"),
        (lambda: b"\x80\x04](" + (b"}" * 999 + b"e(") * 6000 + b"e.", "not a memory snapshot"),
        (lambda: with_stacks(150_000), "150,000"),
    ],
    ids=["lists", "numbers", "texts", "dicts", "stacks"],
)
def test_a_file_of_forty_megabytes_takes_bounded_memory(
    opened: Page, tmp_path: Path, content: Callable[[], bytes], words: str
) -> None:
    """Whatever is in it, the browser holds at most 750 MiB once it has collected its garbage."""
    path = tmp_path / "large.pickle"
    path.write_bytes(content())
    opened.choose(INPUT, path)
    opened.wait(f"document.body.innerText.includes({json.dumps(words)})")

    until(lambda: renderer_bytes(opened) < 750 << 20)
