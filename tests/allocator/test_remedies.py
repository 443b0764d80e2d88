"""Remedies fit the cause, the PyTorch version and the settings in effect."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import BY_NAME, CAPACITY, EXTERNAL, LIMIT, STRANDED, STRANDED_LIMIT, reports

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport, failure_reason
from torchmem.explain.remedies import SETTING_REMEDIES, conf_variable, remedies
from torchmem.explain.verdict import Verdict
from torchmem.sample.engine import Engine
from torchmem.sample.libraries import Communicator
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.run_history import RunHistory

KEYS = {
    "expandable_segments": "expandable_segments",
    "max_split_size": "max_split_size_mb",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "roundup_power2_divisions": "roundup_power2_divisions",
}


def _lines(report: OomReport) -> str:
    return "\n".join(line for remedy in remedies(report) for line in remedy.lines)


@given(reports, st.sets(st.sampled_from(sorted(KEYS))))
def test_settings_in_effect_are_not_suggested(report: OomReport, in_effect: set[str]) -> None:
    """No remedy names a setting that is already in effect."""
    values = {"expandable_segments": "True", "max_split_size": "134217728"}
    lines = _lines(
        replace(report, allocator_settings={name: values.get(name, "0.8") for name in in_effect})
    )

    assert [name for name in in_effect if KEYS[name] in lines] == []


@given(reports)
def test_every_report_has_a_remedy(report: OomReport) -> None:
    """Every report has at least one remedy, and each is one or more sentences."""
    assert remedies(report)
    assert all(remedy.text.endswith((".", ":")) for remedy in remedies(report))


@pytest.mark.parametrize(("step", "first"), [(60, "smaller batch"), (2, "Shard parameters")])
def test_the_components_tell_what_to_reduce(step: int, first: str) -> None:
    """Where most was allocated within the step, the batch comes first, and else the model."""
    components = {"step": step << 30, "parameters": 15 << 30}
    report = replace(CAPACITY, device=replace(CAPACITY.device, components=components))

    assert first in remedies(report)[0].text


@pytest.mark.parametrize(("unread", "first"), [(0, "smaller batch"), (200, "belong neither")])
def test_what_many_steps_kept_is_not_of_this_step(unread: int, first: str) -> None:
    """Bytes since a step that was read long ago are compared with the newest ends of steps."""
    components = {"step": 60 << 30, "parameters": 17 << 30}
    ends = (800, 900, 1000)
    history = RunHistory(
        steps=ends,
        seconds=(80.0, 90.0, 100.0),
        allocated_bytes=(76 << 30, 76 << 30, 76 << 30),
        peak_bytes=(77 << 30, 77 << 30, 77 << 30),
        stranded_bytes=(None,) * 3,
        outside_bytes=(None,) * 3,
        kept_bytes=(None,) * 3,
    )
    report = replace(
        CAPACITY,
        device=replace(CAPACITY.device, components=components, run_history=history),
        steps=replace(CAPACITY.steps, count=1000, read_count=1000 - unread),
    )

    assert first in remedies(report)[0].text


@given(reports)
def test_garbage_collection_is_suggested_only_with_a_limit(report: OomReport) -> None:
    """`garbage_collection_threshold` has no effect without a memory fraction."""
    assert report.limit_bytes is not None or "garbage_collection_threshold" not in _lines(report)


@pytest.mark.parametrize(
    ("versions", "variable"),
    [
        ({"torch": "2.13.0+cu130"}, "PYTORCH_ALLOC_CONF"),
        ({"torch": "2.10.0"}, "PYTORCH_ALLOC_CONF"),
        ({"torch": "2.9.1+cu128"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"torch": "2.9.1+rocm6.4", "hip": "6.4"}, "PYTORCH_HIP_ALLOC_CONF"),
        ({"torch": "a fork"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_variable_is_read_by_the_version(versions: dict[str, str], variable: str) -> None:
    """PyTorch 2.9.1 ignores the new name (pytorch/pytorch#183387), so it gets the old one."""
    assert variable == conf_variable(versions)


def test_settings_are_added_to_existing_ones() -> None:
    """A line keeps other settings, replaces the same key, and unsets the overriding variable."""
    existing = {
        "expandable_segments": "False",
        "pytorch_cuda_alloc_conf": "roundup_power2_divisions:[256:1,>:4],expandable_segments:False",
        "roundup_power2_divisions": "1:1",
    }
    first, *_ = remedies(replace(STRANDED, allocator_settings=existing))

    assert first.lines == (
        "unset PYTORCH_CUDA_ALLOC_CONF",
        "export PYTORCH_ALLOC_CONF='roundup_power2_divisions:[256:1,>:4],expandable_segments:True'",
    )


def test_the_suggested_fraction_is_enough() -> None:
    """With the suggested fraction, the request fits below the limit."""
    fraction = float(_lines(LIMIT).split("fraction(")[1].split(",")[0])
    reserved, total = LIMIT.reserved_bytes, LIMIT.device.total_bytes

    assert reserved is not None
    assert total is not None
    assert LIMIT.oom.requested_bytes is not None
    assert reserved + LIMIT.oom.requested_bytes <= fraction * total
    assert fraction <= 1


def test_fragmentation_below_a_limit_names_the_limit() -> None:
    """Text and remedies name the memory fraction if a higher one would have served the request."""
    text, lines = " ".join(failure_reason(STRANDED_LIMIT)), _lines(STRANDED_LIMIT)

    assert "of the driver's memory: its memory fraction limits it to 40.00 GiB (50% of the" in text
    assert "torch.cuda.set_per_process_memory_fraction(0.92, 0)" in lines
    assert "fraction" not in " ".join(failure_reason(STRANDED)) + _lines(STRANDED)


@given(reports)
def test_every_remedy_has_words_for_series(report: OomReport) -> None:
    """They are its own words: most of them, without numbers and names, are in its text or lines."""
    for remedy in remedies(report):
        assert remedy.kind is not None
        brief = set(re.findall(r"[a-z_]{4,}", REMEDY_WORDS[remedy.kind].lower()))
        full = " ".join((remedy.text, *remedy.lines)).lower()
        assert sum(word in full for word in brief) >= len(brief) / 2


@given(reports, st.frozensets(st.sampled_from(sorted(SETTING_REMEDIES))))
def test_no_refuted_setting_is_advised(report: OomReport, refuted: frozenset[str]) -> None:
    """Settings that a replay has refuted are left out, and nothing else."""
    advice = remedies(report, refuted)

    assert [remedy for remedy in remedies(report) if remedy.setting not in refuted] == list(advice)
    assert not any(
        f"{key}:" in line for remedy in advice for line in remedy.lines for key in refuted
    )


def test_the_query_names_the_device() -> None:
    """For memory held by other processes, the query selects the device by UUID."""
    assert f'nvml_process_memory_bytes{{uuid="{EXTERNAL.device.uuid}"}}' in _lines(EXTERNAL)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_cause_has_its_own_first_remedy(name: str) -> None:
    """The first remedy of each kind of OOM differs from those of `capacity`."""
    differs = remedies(BY_NAME[name])[0] not in remedies(BY_NAME["capacity"])

    assert differs == (name not in {"capacity", "bare", "first_step", "tight"})


def test_the_runbooks_name_only_recommended_settings() -> None:
    """Every allocator setting in a runbook is one that remedies recommend."""
    pages = (Path(__file__).parents[2] / "docs" / "runbooks").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    settings = set(re.findall(r"\b([a-z0-9]+(?:_[a-z0-9]+)+):(?:True|False|[0-9\[])", text))

    assert settings
    assert settings <= SETTING_REMEDIES.keys()


ENGINE = Engine(
    "vllm",
    {"weights": 15 << 30, "kv_cache": 55 << 30, "cudagraph": 1 << 30, "lora": 1 << 29},
    kv_cache_advice_bytes=52 << 30,
)


def _of_engine(engine: Engine, report: OomReport = CAPACITY) -> OomReport:
    components = {"weights": 15 << 30, "kv_cache": 55 << 30, "held": 0}
    device = replace(report.device, engine=engine, components=components)
    return replace(report, device=device, verdict=None)


def test_an_engine_is_told_in_its_own_words() -> None:
    """The KV cache, batches, graphs and adapters are named, and no gradients or optimizer."""
    report = _of_engine(ENGINE)
    texts = " ".join(remedy.text for remedy in remedies(report)).lower()

    size = min(52 << 30, (55 << 30) - (report.oom.requested_bytes or 0) - 150 * (1 << 20))
    lines = _lines(report).splitlines()
    assert lines[0] == f"--kv-cache-memory={size}"
    assert {"--max-num-seqs=128", "--enforce-eager", "--max-loras=1"} <= set(lines)
    assert "chunked prefill" in texts
    assert not re.search("gradient|optimizer|backward|shard", texts)


def test_an_engine_that_cannot_wake_up_needs_its_neighbors() -> None:
    """If the engine was asleep, other processes must return memory first."""
    first = remedies(_of_engine(Engine("vllm", {}, {"kv_cache": 71 << 30})))[0]

    assert "wakes" not in first.text
    assert "71.00 GiB" in first.text
    assert "session.release()" in first.text


def test_a_trainer_with_an_engine_is_told_about_training() -> None:
    """A process with an optimizer trains, also if an engine is in it."""
    device = replace(CAPACITY.device, engine=ENGINE, components={"optimizer_state": 1, "step": 1})
    texts = " ".join(remedy.text for remedy in remedies(replace(CAPACITY, device=device)))

    assert "kv-cache-memory" not in texts


def test_communicators_that_hold_much_are_named() -> None:
    """Where NCCL holds a twentieth of the GPU, its groups and settings follow the other advice."""
    gib = 1 << 30
    total = CAPACITY.device.total_bytes or 0
    groups = {"tp": Communicator(gib, 3 * gib), "dp": Communicator(gib, gib)}
    found = remedies(replace(CAPACITY, device=replace(CAPACITY.device, communicators=groups)))
    few = {"tp": Communicator(total // 50)}

    assert found[0].kind == remedies(CAPACITY)[0].kind
    assert found[-1].kind == "fewer_communicators"
    assert "2 process groups, the largest tp with 4.00 GiB" in found[-1].text
    assert "NCCL_BUFFSIZE" in found[-1].lines[0]
    small = replace(CAPACITY, device=replace(CAPACITY.device, communicators=few))
    assert remedies(small) == remedies(CAPACITY)


def test_idle_communicators_that_would_have_made_room_come_first() -> None:
    """What NCCL gives back while nothing runs is a cure if it is more than the request."""
    gib, now = 1 << 30, CAPACITY.timestamp
    oom = replace(CAPACITY.oom, requested_bytes=gib)
    idle = {"tp": Communicator(gib, 6 * gib, idle_since=now - 720)}
    used = {"tp": Communicator(gib, 6 * gib, idle_since=now - 10)}

    def kinds(groups: dict[str, Communicator]) -> list[str | None]:
        device = replace(CAPACITY.device, communicators=groups)
        return [each.kind for each in remedies(replace(CAPACITY, oom=oom, device=device))]

    assert kinds(idle)[0] == "suspend_communicators"
    assert "suspend_communicators" not in kinds(used)


@pytest.mark.parametrize(("is_shared", "kind"), [(False, "driver_limit"), (True, "page_cache")])
def test_a_driver_that_refuses_needs_another_remedy(is_shared: bool, kind: str) -> None:
    """A higher memory fraction does not help there; a smaller page cache does on shared memory."""
    oom = replace(LIMIT.oom, detail="driver")
    device = replace(LIMIT.device, shares_host_memory=is_shared)
    report = replace(LIMIT, oom=oom, device=device, verdict=Verdict("limit", "driver", None))
    assert [remedy.kind for remedy in remedies(report)] == [kind]
    assert headline(report).startswith("The driver refused")
    assert "a limit of its own" in " ".join(failure_reason(report))
