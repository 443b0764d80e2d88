"""The exporter's settings: from flags, the configuration file and defaults, in that order.

An unknown key in the file is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torchmem.exporter.collect import DEFAULT_DEADLINE_SECONDS
from torchmem.exporter.pod_names import CONTAINER_LOGS
from torchmem.exporter.prices import CURRENCY, DEFAULT_CURRENCY, GpuPrices
from torchmem.exporter.reading import DEFAULT_PROCESSES_PER_GPU
from torchmem.sample import strict_yaml
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import DEFAULT_TTL_SECONDS, run_directory
from torchmem.sample.strict_yaml import Section

DEFAULT_LISTEN = "127.0.0.1:9847"
ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - the meaning of a listen address without a host


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """The settings of the exporter.

    `listen`: HOST:PORT. `systemd_socket`: serve on the socket that systemd passes instead.
    `web_config_file`: TLS and passwords, None for neither. `ttl_seconds`: how long the final values
    of a process that ended are kept. `scrape_deadline_seconds`: how long a scrape waits for the
    driver. `pcie_throughput`: measure it, which takes the driver 40 ms for each GPU.
    `processes_per_gpu`: maximum number of processes exported for each GPU, the largest first.
    `web_ui`: serve the live page at `/`. `allowed_hosts`: further names by which browsers may open
    it on this machine; addresses, localhost and the node's name are always allowed.
    `thresholds`: the file of `torchmem manifests rules`, for the live page.
    `all_series`: also export the series of ranks that no rule and no panel reads.
    `otlp`: also send the metrics by OTLP, as set by OpenTelemetry's environment variables.
    `container_logs`: where the kubelet links the logs of containers, for the names of pods.
    `kubelet_socket`: the kubelet's pod-resources socket, None to leave it alone.
    `scontrol`: Slurm's program that tells which job was given which GPU, None for no such program.
    `gpu_hour_prices`: the price of a GPU-hour by a part of the GPU's name; `currency`: its code.
    """

    listen: str = DEFAULT_LISTEN
    systemd_socket: bool = False
    web_config_file: Path | None = None
    run_dir: Path = field(default_factory=lambda: run_directory(os.environ))
    ttl_seconds: float = DEFAULT_TTL_SECONDS
    scrape_deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    pcie_throughput: bool = False
    processes_per_gpu: int = DEFAULT_PROCESSES_PER_GPU
    web_ui: bool = True
    allowed_hosts: tuple[str, ...] = ()
    thresholds: Path | None = None
    all_series: bool = False
    otlp: bool = False
    container_logs: Path = CONTAINER_LOGS
    kubelet_socket: Path | None = None
    scontrol: Path | None = None
    gpu_hour_prices: Mapping[str, float] = field(default_factory=dict)
    currency: str = DEFAULT_CURRENCY

    @property
    def prices(self) -> GpuPrices:
        """What an hour of each GPU costs."""
        return GpuPrices(self.gpu_hour_prices, self.currency)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; raises UsageError when `listen` is not HOST:PORT."""
        host, colon, port = self.listen.rpartition(":")
        if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise UsageError(
                f"the listen address {self.listen!r} is not HOST:PORT: "
                f"give an address such as {DEFAULT_LISTEN}."
            )
        return host.strip("[]") or ALL_INTERFACES, int(port)

    def as_yaml(self) -> str:
        """Return a configuration file with the same settings."""
        import yaml

        values = {name: _plain(value) for name, value in asdict(self).items()}
        text: str = yaml.safe_dump(values, sort_keys=False, width=1 << 16)
        return text


def load(file: Path | None, flags: Mapping[str, Any]) -> ExporterSettings:
    """Return the settings of `file`, overridden by every flag that is not None.

    Raises UsageError.
    """
    defaults = ExporterSettings()
    values = asdict(defaults if file is None else _from_file(file, defaults))
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in ("run_dir", "container_logs"):
        values[name] = Path(values[name])
    for name in ("web_config_file", "thresholds", "kubelet_socket", "scontrol"):
        values[name] = Path(values[name]) if values[name] else None
    values["allowed_hosts"] = tuple(values["allowed_hosts"])
    values["gpu_hour_prices"] = dict(values["gpu_hour_prices"])
    if not CURRENCY.fullmatch(values["currency"]):
        raise UsageError(
            f"the currency {values['currency']!r} is not a currency code: use one such as USD."
        )
    return ExporterSettings(**values)


def _from_file(file: Path, defaults: ExporterSettings) -> ExporterSettings:
    section = strict_yaml.read(file, [setting.name for setting in fields(ExporterSettings)])
    given = {
        setting.name: _value(section, setting.name, getattr(defaults, setting.name))
        for setting in fields(ExporterSettings)
        if setting.name in section
    }
    return replace(defaults, **given)


def _value(section: Section, key: str, default: Any) -> Any:
    """Return a setting of the file, which has the type of its default; None is that of a path."""
    if isinstance(default, bool):
        return section.flag(key, default)
    if isinstance(default, int):
        return section.count(key, default, "processes")
    if isinstance(default, float):
        return section.number(key, default)
    if isinstance(default, tuple):
        return section.texts(key)
    if isinstance(default, dict):
        prices = section.section(key, None)
        return {model: prices.number(model, 0.0, "units of the currency") for model in prices}
    return section.text(key) if isinstance(default, str) else _path(section, key) or default


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _path(section: Section, key: str) -> Path | None:
    text = section.text(key)
    if not text.isprintable():
        section.refuse(key, "is not a path: correct it.")
    return Path(text) if text else None
