"""PyTorch's settings string: reading it, and telling which settings were ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.settings import LAST_PARSED, ignored_settings, parse_alloc_conf

words = st.text(
    st.characters(exclude_characters=",:[]", exclude_categories=["Z", "C"]), min_size=1, max_size=8
)
lists = st.lists(st.tuples(words, words), min_size=1, max_size=3).map(
    lambda pairs: "[" + ",".join(f"{size}:{count}" for size, count in pairs) + "]"
)
settings = st.dictionaries(words, words | lists, max_size=4)
spaces = st.sampled_from(["", " ", "\t", "  "])


@given(settings, spaces)
def test_what_is_written_is_read(wanted: dict[str, str], space: str) -> None:
    """Keys, values and bracketed lists survive, wherever white space stands."""
    text = f"{space},{space}".join(f"{key}{space}:{space}{value}" for key, value in wanted.items())

    assert wanted == parse_alloc_conf(space + text + space)


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    """Whatever somebody exported, the answer is a mapping of non-empty keys to non-empty values."""
    assert all(key and value for key, value in parse_alloc_conf(text).items())


def effective(parsed: str = "", **read: str) -> dict[str, str]:
    """What a process on the native allocator says, by default that nothing was set."""
    return {"backend": "native", "expandable_segments": "False", LAST_PARSED: parsed, **read}


@given(settings)
def test_settings_that_were_parsed_are_not_called_ignored(wanted: dict[str, str]) -> None:
    """Whatever the environment asks for, when the allocator took over that text nothing that it knows was ignored."""
    plain = {
        key: value for key, value in wanted.items() if key not in {"backend", "expandable_segments"}
    }
    text = ",".join(f"{key}:{value}" for key, value in plain.items())

    assert dict.fromkeys(plain, False) == ignored_settings(
        {"PYTORCH_CUDA_ALLOC_CONF": text}, effective(text)
    )


@pytest.mark.parametrize(
    "variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
)
def test_a_variable_that_was_never_read_is_ignored_whole(variable: str) -> None:
    """The allocator parsed nothing: set too late, or under a name that this version does not read."""
    environment = {variable: "expandable_segments:True,max_split_size_mb:128"}

    assert {"expandable_segments": True, "max_split_size_mb": True} == ignored_settings(
        environment, effective()
    )


def test_a_setting_that_this_build_lacks_is_ignored() -> None:
    """Parsed but not in effect, as expandable segments are in builds without the driver's API."""
    text = "expandable_segments:True,max_split_size_mb:128"
    told = effective(text, max_split_size=str(128 << 20))

    assert {"expandable_segments": True, "max_split_size_mb": False} == ignored_settings(
        {"PYTORCH_ALLOC_CONF": text}, told
    )


def test_the_variable_that_lost_is_ignored() -> None:
    """PyTorch reads one variable; where both ask for the same, nothing was ignored."""
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    told = effective("expandable_segments:True") | {"expandable_segments": "True"}
    same = dict.fromkeys(environment, "expandable_segments:True")

    assert {"expandable_segments": False, "max_split_size_mb": True} == ignored_settings(
        environment, told
    )
    assert {"expandable_segments": False} == ignored_settings(same, told)


def test_nobody_can_tell_after_a_change_at_run_time() -> None:
    """The script parsed another string since: only the backend, which cannot change, still has a verdict."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native,max_split_size_mb:64"}

    assert {"backend": False} == ignored_settings(environment, effective("max_split_size_mb:128"))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("cudaMallocAsync", {"backend": False}), ("native", {"backend": True}), ("pluggable", {})],
)
def test_other_backends_tell_only_themselves(backend: str, expected: dict[str, bool]) -> None:
    """Without the native allocator's account no verdict is given on what only it would know."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True"}

    assert expected == ignored_settings(environment, {"backend": backend})
