"""The SDK's settings: keyword over `TORCHMEM_*` environment variable over default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.sample.run_directory import run_directory

PREFIX = "TORCHMEM_"
log = logging.getLogger("torchmem")


class SettingsKeywords(TypedDict, total=False):
    """The keywords of `instrument`, for type checkers; `Settings` documents them."""

    run: str | None
    run_dir: str | Path | None
    rank: int | None
    interval: float
    snapshot_interval: float
    snapshot_budget: float
    reset_peaks: bool
    idle_after: float
    stall_after: float
    capture_on_oom: bool
    release: float | None
    release_interval: float
    port: int | None
    address: str
    textfile: str | Path | None
    enabled: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """What `instrument` can be told; every field is also an environment variable, `TORCHMEM_RUN` and so on.

    run: name of the run, a label on every series; default from the scheduler, else the script's name.
    run_dir: run directory; default TORCHMEM_RUN_DIR, /run/torchmem if it exists, /tmp/torchmem.
    rank: global rank; default from the launcher's environment.
    interval: seconds between two reads of the statistics, and between two publications; where they are costly, up to
        five times as long.
    snapshot_interval: shortest time in seconds between two memory snapshots.
    snapshot_budget: share of wall time that snapshots may take; a costly snapshot is taken less often.
    reset_peaks: True resets PyTorch's peaks at the begin of a phase, which makes the peaks of phases exact; your own
        `torch.cuda.max_memory_*` go on as if nothing had happened.
    idle_after: seconds without an optimizer step after which the background thread reads the statistics.
    stall_after: seconds without a step, after there were some, until the process counts as stalled.
    capture_on_oom: keep PyTorch's memory snapshot at an OutOfMemoryError, the newest one, in the run directory.
    release: return the cache at a step's end when the driver has less than this share of the device free and the next
        step would not take it back; None never does. Resets PyTorch's peaks like `reset_peaks`.
    release_interval: least seconds between two such looks.
    port: serve /metrics in this process too, on port + local rank; 0 takes any free port; None opens no port.
    address: where that endpoint listens.
    textfile: write a node_exporter textfile to this .prom file, or into this directory.
    enabled: False makes `instrument` do nothing.
    """

    run: str | None = None
    run_dir: Path | None = None
    rank: int | None = None
    interval: float = 1.0
    snapshot_interval: float = 10.0
    snapshot_budget: float = 0.0006
    reset_peaks: bool = False
    idle_after: float = 5.0
    stall_after: float = 300.0
    capture_on_oom: bool = False
    release: float | None = None
    release_interval: float = 10.0
    port: int | None = None
    address: str = "127.0.0.1"
    textfile: Path | None = None
    enabled: bool = True

    def directory(self, environment: Mapping[str, str]) -> Path:
        """The run directory that is in force."""
        return self.run_dir or run_directory(environment)


def resolve(keywords: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Merge keywords and environment.

    Raises UsageError for a keyword that does not exist or has an impossible value. A bad environment variable is
    logged and ignored: it may have been set for a thousand processes by somebody else.
    """
    for name in keywords:
        if name not in _PARSERS:
            raise UsageError(f"instrument() has no setting {name!r}{_suggestion(name)}.")
    return Settings(
        **(
            _from_environment(environment)
            | {name: _parse(name, keywords[name]) for name in keywords}
        )
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in _PARSERS:
        text = environment.get(PREFIX + name.upper())
        if text:
            try:
                values[name] = _parse(name, text)
            except UsageError as error:
                log.warning("%s%s is ignored: %s", PREFIX, name.upper(), error)
    return values


def _parse(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        return _PARSERS[name](value)
    except (TypeError, ValueError):
        raise UsageError(
            f"the setting {name} cannot be {value!r}; see help(torchmem.sdk.instrument)"
        ) from None


def _suggestion(name: str) -> str:
    return "; " + did_you_mean(name, _PARSERS, f"the settings are {', '.join(_PARSERS)}")


def _boolean(value: Any) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    return words.get(str(value).lower()) if str(value).lower() in words else _reject(value)  # type: ignore[return-value]


def _positive(value: Any) -> float:
    number = float(value)
    return number if 0 < number < float("inf") else _reject(value)


def _share(value: Any) -> float:
    number = float(value)
    return number if 0 < number < 1 else _reject(value)


def _port(value: Any) -> int:
    number = int(value)
    return number if 0 <= number <= 65535 else _reject(value)


def _rank(value: Any) -> int:
    number = int(value)
    return number if number >= 0 else _reject(value)


def _reject(value: Any) -> Any:
    raise ValueError(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "run": str,
    "run_dir": Path,
    "rank": _rank,
    "interval": _positive,
    "snapshot_interval": _positive,
    "snapshot_budget": _positive,
    "reset_peaks": _boolean,
    "idle_after": _positive,
    "stall_after": _positive,
    "capture_on_oom": _boolean,
    "release": _share,
    "release_interval": _positive,
    "port": _port,
    "address": str,
    "textfile": Path,
    "enabled": _boolean,
}

assert set(_PARSERS) == {field.name for field in fields(Settings)}  # noqa: S101 - a field without a parser is a bug
