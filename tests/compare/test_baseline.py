"""Baseline files, and what comparing with one says, as text and as Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.compare import baseline, markdown
from torchmem.compare.baseline import Baseline, BaselineEntry
from torchmem.compare.peak_lines import change_lines, headline, held_lines, kept_lines
from torchmem.compare.peak_memory import PeakMemory, SourceLine, Use, diff
from torchmem.sample.errors import UsageError
from torchmem.sample.remedy_words import REMEDY_WORDS

LINE = SourceLine("model.py", 31, "forward", "weights = scores.softmax(-1)")
USAGE = PeakMemory(
    100 * MIB,
    120 * MIB,
    uses=(
        Use("parameters", 20 * MIB, "layers.*.up"),
        Use("activations", 80 * MIB, "layers.*.attention", LINE),
    ),
)
ENTRY = BaselineEntry(USAGE, "h100-80gb", "2.13.0+cu130")
GROWN = replace(
    ENTRY,
    memory=PeakMemory(
        140 * MIB,
        160 * MIB,
        uses=(USAGE.uses[0], replace(USAGE.uses[1], bytes=120 * MIB)),
    ),
)


def test_the_file_is_stable(tmp_path: Path) -> None:
    """Saving the same again, in any order, gives the same bytes, and loading gives the entries."""
    path = tmp_path / "gpu-memory.json"
    baseline.save(path, {"b": ENTRY, "a": GROWN})
    first = path.read_bytes()
    baseline.save(path, {"a": GROWN})
    baseline.save(path, {"b": ENTRY})
    assert path.read_bytes() == first
    assert baseline.load(path).entries == {"a": GROWN, "b": ENTRY}
    assert json.loads(first)["schema"] == baseline.SCHEMA
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no baseline"),
        (b"{", "is not JSON, or is cut off: restore it, or save the baseline again."),
        (b'{"schema": 99, "entries": {}}', "is not a baseline of schema 1"),
        (b'{"schema": 1, "entries": {"a": {"torch": 1}}}', "is not a baseline of schema 1"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """A file that is not a baseline is rejected in one sentence."""
    path = tmp_path / "gpu-memory.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        baseline.load(path)
    assert sentence in str(caught.value)


def test_a_large_baseline_of_nothing(tmp_path: Path) -> None:
    """60 MB of empty lists, which would take 1.5 GB, are refused before they are read."""
    path = tmp_path / "gpu-memory.json"
    path.write_bytes(b'{"schema": 1, "torch": 1, "entries": [' + b"[]," * 20_000_000 + b"[]]}")
    program = f"ulimit -v 1000000; exec {sys.executable} -m torchmem.cli compare {path} {path}"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == (
        f"torchmem: {path} has too many values: restore it, or save the baseline again.\n"
    )


def test_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    """A folder that is missing, and one in place of the file, are refused before any run."""
    baseline.check_output(tmp_path / "comment.md")
    baseline.check_output(None)
    with pytest.raises(UsageError, match="create it first"):
        baseline.check_output(tmp_path / "no" / "comment.md")
    with pytest.raises(UsageError, match="is a directory: name a file in it"):
        baseline.check_output(tmp_path)


def test_tolerance() -> None:
    """A tolerance is a percentage; within it memory is the same, in both directions."""
    assert baseline.parse_tolerance("2%") == 0.02
    with pytest.raises(UsageError, match="in percent, such as 2%"):
        baseline.parse_tolerance("2")
    known = Baseline({"a": ENTRY})
    assert known.compare("a", GROWN, 0.5).outcome == "same"
    assert known.compare("a", GROWN, 0.1).outcome == "more"
    assert Baseline({"a": GROWN}).compare("a", ENTRY, 0.1).outcome == "less"


def test_what_does_not_compare() -> None:
    """Another PyTorch, another GPU model and a new test are said to be so, not compared."""
    known = Baseline({"a": ENTRY})
    other = known.compare("a", replace(ENTRY, torch="2.14.0+cu130"))
    assert (other.outcome, other.diff) == ("other", None)
    assert "is of PyTorch 2.13.0+cu130, and this is PyTorch 2.14.0+cu130" in other.sentence
    model = known.compare("a", replace(ENTRY, gpu_model="a100-40gb"))
    assert "is of h100-80gb, and this is a100-40gb" in model.sentence
    assert known.compare("b", ENTRY).outcome == "new"


def test_a_regression_is_named() -> None:
    """The sentence, the first words and the lines name what costs the memory."""
    found = Baseline({"a": ENTRY}).compare("a", GROWN)
    assert found.sentence == (
        "a needs more memory: peak allocated 140.00 MiB instead of 100.00 MiB (+40.0%)."
    )
    assert found.diff is not None
    assert headline(found.diff) == ("+40.00 MiB activations in layers.*.attention (model.py:31)")
    assert list(change_lines(found.diff))[1:] == [
        "    +40.00 MiB  activations  layers.*.attention  model.py:31  weights = scores.softmax(-1)"
    ]
    assert list(held_lines(GROWN.memory))[1:] == [
        "    120.00 MiB  activations  layers.*.attention  model.py:31  " + LINE.code,
        "     20.00 MiB  parameters   layers.*.up",
    ]


def test_the_component_that_grew_most_is_named() -> None:
    """The first words are of it, and each component that grew has a row."""
    many = [Use("activations", 10 * MIB, f"layers.{index}", LINE) for index in range(20)]
    cache = Use("held", 30 * MIB, "cache", LINE)
    parameters = replace(USAGE.uses[0], bytes=25 * MIB, line=LINE)
    found = diff(USAGE, PeakMemory(330 * MIB, uses=(parameters, USAGE.uses[1], *many, cache)))
    assert headline(found) == "+10.00 MiB activations in layers.0 (model.py:31)"
    rows = [line.split()[2] for line in change_lines(found) if line.startswith(" ")]
    assert len(rows) == 8
    assert {*rows} == {"held", "activations", "parameters"}


def test_what_steps_keep_has_advice() -> None:
    """If steps keep more, the text says what the lines show, and what to look for."""
    kept = Use("held", 40 * MIB, "layers.*.attention", LINE)
    memory = PeakMemory(140 * MIB, uses=(*USAGE.uses, kept))
    found = diff(USAGE, memory)
    advice = " ".join(kept_lines(memory))
    assert "which do not show what keeps it." in advice
    assert REMEDY_WORDS["find_kept"] in advice
    assert list(change_lines(found))[2:] == kept_lines(memory)
    little = replace(memory, uses=(*USAGE.uses, replace(kept, bytes=2 * MIB)))
    assert kept_lines(little) == []
    compared = Baseline({"a": ENTRY}).compare("a", replace(ENTRY, memory=memory))
    assert "do not show what keeps it." in markdown.page([compared], phantom=True)


def test_variation() -> None:
    """Runs of the same code that differ beyond the tolerance are said to vary, and by how much."""
    assert baseline.variation([100 * MIB, 101 * MIB], 0.02) is None
    assert "varies by 10.00 MiB (10.0%) between 2 runs" in str(
        baseline.variation([110 * MIB, 100 * MIB], 0.02)
    )


def test_markdown() -> None:
    """The comment starts with what needs more, has a chart, and no name can break the table."""
    known = Baseline({"a|<b>`": ENTRY, "same": ENTRY})
    compared = [known.compare("same", ENTRY), known.compare("a|<b>`", GROWN)]
    page = markdown.page(compared, phantom=True)
    assert page.startswith("### GPU memory: 1 need more, 1 unchanged\n")
    rows = [line for line in page.splitlines() if line.startswith("| 🔴")]
    assert len(rows) == 1
    assert rows[0].count("|") == 7
    assert "<b>" not in page
    assert 'x-axis ["parameters", "activations"]' in page
    bars = [line for line in page.splitlines() if line.startswith("    bar")]
    assert bars == ["    bar [20.00, 80.00]", "    bar [20.00, 120.00]", "    bar [20.00, 80.00]"]
    assert page.index("🔴") < page.index("| same |")
