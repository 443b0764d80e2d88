"""The exporter's settings: flag, else key of the configuration file, else default; a misspelt key is an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from torchmem.core.errors import UsageError
from torchmem.core.rundir import run_directory
from torchmem.exporter.collect import DEFAULT_DEADLINE_SECONDS
from torchmem.exporter.rundir import DEFAULT_TTL_SECONDS

DEFAULT_LISTEN = "127.0.0.1:9847"


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set.

    `listen`: HOST:PORT; `ttl_seconds`: how long the final values of an ended process are kept;
    `scrape_deadline_seconds`: how long a scrape waits for the driver.
    """

    listen: str = DEFAULT_LISTEN
    run_dir: Path = field(default_factory=lambda: run_directory(os.environ))
    ttl_seconds: float = DEFAULT_TTL_SECONDS
    scrape_deadline_seconds: float = DEFAULT_DEADLINE_SECONDS

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; raises UsageError when `listen` is not HOST:PORT."""
        host, colon, port = self.listen.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"The listen address {self.listen!r} is not HOST:PORT: give one such as {DEFAULT_LISTEN}.")
        return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - `:9847` asks for all interfaces


def load(file: Path | None, flags: Mapping[str, str | None]) -> Settings:
    """The settings of `file`, overridden by every flag that was given; raises UsageError."""
    values = {} if file is None else _checked(_parse(file), file)
    values |= {name: value for name, value in flags.items() if value is not None}
    if "run_dir" in values:
        values["run_dir"] = Path(values["run_dir"])
    return Settings(**values)


def _parse(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UsageError(f"Cannot read the configuration file {file}: {error.strerror}; check the path.") from error
    except (yaml.YAMLError, UnicodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise UsageError(f"The configuration file {file} is not valid YAML{line}: correct it.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"The configuration file {file} must hold `key: value` lines, such as listen: {DEFAULT_LISTEN}."
        )
    return content


def _checked(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    names = [setting.name for setting in fields(Settings)]
    for key, value in content.items():
        if key not in names:
            close = get_close_matches(str(key), names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(names)}."
            raise UsageError(f"Unknown key {key!r} in {file}: {hint}")
        _check_type(str(key), value, file)
    return dict(content)


def _check_type(key: str, value: object, file: Path) -> None:
    if key.endswith("_seconds"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
            raise UsageError(f"{key} in {file} is {value!r}: give a positive number of seconds.")
    elif not isinstance(value, str):
        raise UsageError(f"{key} in {file} is {value!r}: give text, in quotes if YAML reads it as something else.")
