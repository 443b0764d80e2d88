"""Any text: what `torchmem why` says of each of the texts in texts.yml."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchmem.explain.texts.formats import FORMATS
from torchmem.explain.texts.judgment import tolerance
from torchmem.why.text import explain_stream

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("texts.yml").read_text())
PLACES = {"rank", "ranks", "step", "time"}
OF_A_MESSAGE = {"cause", "detail", "candidates", "format", "own_pid", "count"} | PLACES
ABOUT_THE_TEXT = {"name", "text", "exit", "consequences", "other", "notice", "table", "smi"}


def explained(text: str) -> dict[str, Any]:
    """Return the document about a text."""
    return explain_stream(io.BytesIO(text.encode())).document()


def first(document: dict[str, Any], role: str) -> dict[str, Any]:
    """Return the first message of a role; {} if there is none."""
    return next((each for each in document["messages"] if each["role"] == role), {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_answer_is_right(case: dict[str, Any]) -> None:
    """The first message has the format, cause, rank, step and numbers that were written first."""
    document = explained(case["text"])
    found = first(document, "oom")
    if "format" not in case:
        assert found == {}
    for name in OF_A_MESSAGE & case.keys():
        assert found[name] == case[name], name
    if "others" in case:
        assert [holder["pid"] for holder in found["others"]] == case["others"]
    table = first(document, "table")
    numbers = table["numbers"] if "table" in case else found.get("numbers", {})
    for name in case.keys() - OF_A_MESSAGE - ABOUT_THE_TEXT - {"others"}:
        assert_equal(numbers[name], case[name], name)


def assert_equal(found: Any, expected: Any, name: str) -> None:
    """Check a number up to what two decimals show."""
    if found is None or expected is None:
        assert found == expected, name
    else:
        assert abs(found - expected) <= tolerance(expected), name


@pytest.mark.parametrize(
    "case", [case for case in CASES if "candidates" in case], ids=lambda case: case["name"]
)
def test_each_possible_cause_has_its_advice(case: dict[str, Any]) -> None:
    """Where PyTorch's message leaves several causes, it says what to do in the case of each."""
    document = explained(case["text"])
    found = first(document, "oom")
    expected = len(case["candidates"]) if found["format"] == "pytorch" else 0

    assert len(found["advice"]) == expected
    assert all(each["text"].startswith("If ") for each in found["advice"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_is_not_explained_is_named(case: dict[str, Any]) -> None:
    """Consequences, other programs and warnings are told apart from what is explained."""
    document = explained(case["text"])
    fell = [each for each in document["messages"] if each["role"] == "consequence"]

    assert document["explained"] == (case.get("exit", 0) == 0)
    assert first(document, "other").get("format") == case.get("other")
    if "notice" in case:
        assert first(document, "notice")["format"] == case["notice"]
    if "consequences" in case:
        causing = set(first(document, "oom").get("ranks", []))
        ranks = {rank for each in fell for rank in each["ranks"]}
        assert sorted(ranks - causing) == case["consequences"]


@pytest.mark.parametrize("case", [case for case in CASES if "smi" in case], ids=str)
def test_nvidia_smi(case: dict[str, Any]) -> None:
    """Its table gives each GPU, what is used of it, and the processes."""
    table = first(explained(case["text"]), "table")["numbers"]

    assert [
        [use["gpu"], use["used"], use["total"], [holder["pid"] for holder in use["holders"]]]
        for use in table["gpus"]
    ] == case["smi"]


def test_there_are_many_texts() -> None:
    """At least 120, 60 of them in the shapes that people have, and each format is in one."""
    formats = {case.get(key) for case in CASES for key in ("format", "other", "notice")}
    consequences = {"collective_timeout", "lost_peer", "stopped"}

    assert len(CASES) >= 120
    assert sum(case["name"].startswith("shape") for case in CASES) >= 60
    assert {known.name for known in FORMATS} - consequences <= formats
