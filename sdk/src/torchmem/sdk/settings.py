"""The SDK's settings: a keyword, else a `TORCHMEM_*` environment variable, else the default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

from torchmem.allocator.settings import ADVICE_VARIABLE
from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.sample.release_tiers import EVERY_TIER, SETTING_TIERS, ReleaseTier
from torchmem.sample.run_directory import run_directory
from torchmem.sdk.safety.cost import INTERVAL_SECONDS, SNAPSHOT_BUDGET, SNAPSHOT_INTERVAL_SECONDS
from torchmem.sdk.safety.errors import log

PREFIX = "TORCHMEM_"
# Variables that other parts of torchmem read: compose, the systemd unit, `torchmem preflight`,
# `torchmem run`, and the identity of the process.
OTHER_VARIABLES = {
    "TORCHMEM_DASHBOARDS",
    "TORCHMEM_EXPORTER_ARGS",
    "TORCHMEM_PREFLIGHT",
    "TORCHMEM_SUMMARY",
    "TORCHMEM_THRESHOLDS",
    ADVICE_VARIABLE,
}
# Share of letters, by difflib, from which an unknown variable counts as misspelled.
MIN_RESEMBLANCE = 0.93

MAX_SECONDS = 7 * 24 * 3600
MAX_RANK = 2**31 - 1
MAX_PORT = 65535
MAX_SHOWN = 60  # characters of a wrong value


HistorySetting = bool | Literal["oom"]
CaptureSetting = bool | Literal["trace"]


class SettingsKeywords(TypedDict, total=False):
    """The keywords of `instrument`, for type checkers; documented at `Settings`."""

    run: str | None
    run_dir: str | Path | None
    rank: int | None
    interval: float
    snapshot_interval: float
    snapshot_budget: float
    reset_peaks: bool
    idle_after: float
    stall_after: float
    capture_on_oom: CaptureSetting
    note_on_oom: bool
    collect_on_oom: bool
    memory_map: bool
    history: HistorySetting
    release: float | str | None
    release_interval: float
    port: int | None
    address: str
    textfile: str | Path | None
    otlp: bool
    enabled: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `instrument`. Each one is also an environment variable: TORCHMEM_RUN etc.

    run: name of the run, a label on every series; by default the scheduler's job name, else the
        script's name.
    run_dir: run directory; default /run/torchmem if it exists, else /tmp/torchmem. See
        docs/sdk.md#the-run-directory.
    rank: global rank, a label on every series; default torch.distributed's, else the launcher's,
        else 0. See docs/frameworks.md#which-rank.
    interval: seconds between two reads of the statistics, and between two publications; up to five
        times as long if they are expensive.
    snapshot_interval: shortest mean time in seconds between two memory snapshots.
    snapshot_budget: share of wall time for snapshots; expensive ones are taken less often.
    reset_peaks: reset PyTorch's peaks at the start of each phase, which makes the peaks of phases
        exact; your own `torch.cuda.max_memory_*` values are not affected.
    idle_after: seconds without an optimizer step before the background thread asks for a read.
    stall_after: seconds without a step or an allocation, after the first step, before the process
        counts as stalled.
    capture_on_oom: keep PyTorch's memory snapshot of the newest OutOfMemoryError in the run
        directory; "trace" also records and keeps all allocations, without stacks. See
        docs/recordings.md#at-an-oom.
    note_on_oom: say why memory ran out at the end of the traceback of an OutOfMemoryError that ends
        the script or a thread. See docs/sdk.md#in-the-traceback.
    collect_on_oom: run Python's garbage collector once an OutOfMemoryError has ended the script, to
        tell tensors in reference cycles from a leak. See docs/sdk.md#garbage.
    memory_map: publish the addresses and sizes of segments and blocks while the exporter asks for
        them for a viewer of the live page, and after an OutOfMemoryError. See
        docs/screens.md#memory-map.
    history: record the Python stack of each allocation, so that OOM reports name the lines that
        hold the memory and the lines that grew: "oom" while memory may run out soon, True always.
        See docs/sdk.md#which-lines-hold-the-memory.
    release: return memory to the driver when it is short: names of tiers, each with the share of
        the device below which it acts, such as "hooks,cache=0.1,emergency". A number
        is the share of the tier `cache`; None never releases. See docs/release.md.
    release_interval: shortest time in seconds between two releases at the end of a step.
    port: also serve /metrics in this process, on port + local rank; 0 takes any free port.
    address: address that the port listens on.
    textfile: also write a node_exporter textfile: a .prom file, or a directory for one per rank.
    otlp: also send the series of this process by OTLP, as configured by OpenTelemetry's environment
        variables. See docs/integrations.md#opentelemetry.
    enabled: False makes `instrument` do nothing.
    """

    run: str | None = None
    run_dir: Path | None = None
    rank: int | None = None
    interval: float = INTERVAL_SECONDS
    snapshot_interval: float = SNAPSHOT_INTERVAL_SECONDS
    snapshot_budget: float = SNAPSHOT_BUDGET
    reset_peaks: bool = False
    idle_after: float = 5.0
    stall_after: float = 300.0
    capture_on_oom: CaptureSetting = False
    note_on_oom: bool = True
    collect_on_oom: bool = True
    memory_map: bool = True
    history: HistorySetting = False
    release: Mapping[ReleaseTier, float] | None = None
    release_interval: float = 10.0
    port: int | None = None
    address: str = "127.0.0.1"
    textfile: Path | None = None
    otlp: bool = False
    enabled: bool = True

    def directory(self, environment: Mapping[str, str]) -> Path:
        """Return the run directory in effect."""
        return self.run_dir or run_directory(environment)


def resolve(keywords: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Merge keywords and environment.

    Raises UsageError for an unknown keyword, or an invalid value of a keyword. A variable that is
    not a setting, or has an invalid value, is logged and ignored, because it may have been set for
    a thousand processes at once.
    """
    for name in keywords:
        if name not in _PARSERS:
            raise UsageError(f"instrument() has no setting {name!r}{_suggestion(name)}.")
    _check_names(environment)
    values = _from_environment(environment)
    values |= {name: _parse(name, value) for name, value in keywords.items()}
    return Settings(**values)


def _check_names(environment: Mapping[str, str]) -> None:
    settings = {PREFIX + name.upper() for name in _PARSERS}
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in settings | OTHER_VARIABLES:
            close = get_close_matches(variable, settings, n=1, cutoff=MIN_RESEMBLANCE)
            hint = f"; did you mean {close[0]}?" if close else ""
            log(logging.WARNING, "%s is not a setting and is ignored%s", variable, hint)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in _PARSERS:
        text = environment.get(PREFIX + name.upper())
        if text:
            try:
                values[name] = _parse(name, text)
            except UsageError as error:
                log(logging.WARNING, "%s%s is ignored: %s", PREFIX, name.upper(), error)
    return values


def _parse(name: str, value: Any) -> Any:
    if value is None:
        return None
    parser = _PARSERS[name]
    try:
        return parser.convert(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"the setting {name} cannot be {_shown(value)}: it must be {parser.expected}."
        ) from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        return "so large"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _suggestion(name: str) -> str:
    return "; " + did_you_mean(name, _PARSERS, f"the settings are {', '.join(_PARSERS)}")


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(value: Any) -> bool:
    text = str(value).lower()
    return _BOOLEANS[text] if text in _BOOLEANS else _reject(value)


def _history(value: Any) -> HistorySetting:
    return "oom" if str(value).lower() == "oom" else _boolean(value)


def _capture(value: Any) -> CaptureSetting:
    return "trace" if str(value).lower() == "trace" else _boolean(value)


def _seconds(value: Any) -> float:
    number = float(value)
    return number if 0 < number <= MAX_SECONDS else _reject(value)


def _budget(value: Any) -> float:
    number = float(value)
    return number if 0 < number <= 1 else _reject(value)


def _share(value: Any) -> float:
    number = float(value)
    return number if 0 < number < 1 else _reject(value)


def _release(value: Any) -> dict[ReleaseTier, float]:
    """Return the share of each named tier, such as in "cache=0.2,emergency".

    A number is the share of the tier `cache`. A tier that has no share gets 0.
    """
    with contextlib.suppress(TypeError, ValueError):
        return {"cache": _share(value)}
    tiers: dict[ReleaseTier, float] = {}
    for item in str(value).split(","):
        name, _, share = (part.strip() for part in item.partition("="))
        tier = SETTING_TIERS.get(name)
        if tier is None or tier.name in tiers or (share and tier.share is None):
            _reject(value)
        else:
            tiers[tier.name] = _share(share) if share else tier.share or 0.0
    return tiers


def _port(value: Any) -> int:
    number = int(value)
    return number if 0 <= number <= MAX_PORT else _reject(value)


def _rank(value: Any) -> int:
    number = int(value)
    return number if 0 <= number <= MAX_RANK else _reject(value)


def _reject(value: Any) -> Any:
    raise ValueError(value)


@dataclass(frozen=True, slots=True)
class _Parser:
    """How to convert a value, and what it must be, for the error message."""

    convert: Callable[[Any], Any]
    expected: str


_SECONDS = _Parser(_seconds, f"a number of seconds above 0 and at most {MAX_SECONDS}")
_BOOLEAN = _Parser(_boolean, "true or false")
_TEXT = _Parser(str, "text")
_PATH = _Parser(Path, "a path")

_PARSERS: dict[str, _Parser] = {
    "run": _TEXT,
    "run_dir": _PATH,
    "rank": _Parser(_rank, f"an integer from 0 to {MAX_RANK}"),
    "interval": _SECONDS,
    "snapshot_interval": _SECONDS,
    "snapshot_budget": _Parser(_budget, "a number above 0 and at most 1"),
    "reset_peaks": _BOOLEAN,
    "idle_after": _SECONDS,
    "stall_after": _SECONDS,
    "capture_on_oom": _Parser(_capture, '"trace", true or false'),
    "note_on_oom": _BOOLEAN,
    "collect_on_oom": _BOOLEAN,
    "memory_map": _BOOLEAN,
    "history": _Parser(_history, '"oom", true or false'),
    "release": _Parser(
        _release,
        f'a number above 0 and below 1, or tiers such as "{EVERY_TIER}"',
    ),
    "release_interval": _SECONDS,
    "port": _Parser(_port, f"an integer from 0 to {MAX_PORT}"),
    "address": _TEXT,
    "textfile": _PATH,
    "otlp": _BOOLEAN,
    "enabled": _BOOLEAN,
}

assert set(_PARSERS) == {field.name for field in fields(Settings)}  # noqa: S101 - no parser: a bug
