"""The exporter as a process: print the metrics once, or serve them until a signal.

SIGHUP reloads the configuration. With systemd, the exporter takes a listening socket
(sd_listen_fds(3)) and reports its state (sd_notify(3)).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial

from prometheus_client import generate_latest

from torchmem.explain.chosen_thresholds import chosen
from torchmem.exporter import config
from torchmem.exporter.collect import Exporter
from torchmem.exporter.config import ExporterSettings
from torchmem.exporter.driver import PyNvml
from torchmem.exporter.gpu_assignments import GpuAssignments, Pods
from torchmem.exporter.pod_names import PodNames
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import DEFAULT_LIMITS, Heartbeat, serve
from torchmem.exporter.slurm_jobs import SlurmJobs
from torchmem.exporter.start_memory import give_back, share_arena
from torchmem.exporter.web.config import LiveConfig
from torchmem.sample.errors import MissingExtraError, TorchmemError, UsageError

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RELOADED = {
    *("scrape_deadline_seconds", "processes_per_gpu", "pcie_throughput", "thresholds"),
    *("gpu_hour_prices", "currency"),
}
_LAST_SEND_SECONDS = 0.5
_FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed flags and return the exit code.

    Raises UsageError for a flag or setting that cannot be used.
    """
    flags = {
        setting.name: getattr(arguments, setting.name, None) for setting in fields(ExporterSettings)
    }
    load = partial(config.load, arguments.config, flags)
    settings = load()
    if arguments.print_config:
        _print(settings.as_yaml())
        return 0
    _configure_logging()
    assigned = pod_resources(settings)
    pods = PodNames(settings.container_logs, assigned)
    jobs = SlurmJobs(settings.scontrol) if settings.scontrol else None
    exporter = Exporter(
        PyNvml(),
        RunDirectory(settings.run_dir, settings.ttl_seconds, all_series=settings.all_series),
        settings.scrape_deadline_seconds,
        processes_per_gpu=settings.processes_per_gpu,
        pcie_throughput=settings.pcie_throughput,
        thresholds=chosen(settings.thresholds),
        prices=settings.prices,
        pods=pods,
        assignments=GpuAssignments(assigned, jobs),
        all_series=settings.all_series,
    )
    with closing(exporter):
        if arguments.once:
            _print(generate_latest(exporter).decode())
        else:
            serve_until_signal(exporter, settings, load)
    return 0


def pod_resources(settings: ExporterSettings) -> Pods:
    """Return what lists the containers with GPUs; without the setting, it lists none.

    Raises MissingExtraError when the setting `kubelet_socket` needs an extra.
    """
    if settings.kubelet_socket is None:
        return tuple
    try:
        from torchmem.exporter.pod_resources import PodResources
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "exporter --kubelet-socket", error.name or "", "kubernetes"
        ) from error
    return PodResources(settings.kubelet_socket)


def _configure_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _print(text: str) -> None:
    """Write to stdout. A reader that closes early, such as `head`, is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # At its exit, Python flushes stdout once more ("Note on SIGPIPE" in the docs of signal).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def serve_until_signal(
    exporter: Exporter,
    settings: ExporterSettings,
    load: Callable[[], ExporterSettings] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop at once, even while a scrape waits for the driver.

    At SIGHUP, `load` reads the settings again; without it they stay as they are. Raises
    TorchmemError when the server stops by itself.
    """
    listener = systemd_listener() if settings.systemd_socket else None
    heartbeat = Heartbeat(partial(notify_systemd, "WATCHDOG=1"), watchdog_seconds())
    web = LiveConfig(settings.web_config_file)
    share_arena()
    # Signals are blocked in every thread that starts from here on, and waited for. A handler would
    # interrupt the main thread anywhere, perhaps while it holds a lock that the handler needs.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    wake = partial(signal.pthread_kill, threading.get_ident(), signal.SIGTERM)
    running = serve(
        exporter,
        *settings.address,
        listener=listener,
        web=web,
        limits=DEFAULT_LIMITS.within_descriptors(),
        heartbeat=heartbeat,
        web_ui=settings.web_ui,
        allowed_hosts=settings.allowed_hosts,
        on_stop=wake,
        give_back=give_back,
    )
    with closing(running) as server, closing(exporter), sending(exporter, otlp=settings.otlp):
        _log.info("serving %s/metrics from the run directory %s", server.url, settings.run_dir)
        notify_systemd("READY=1")
        while not server.stopped.is_set():
            if signal.sigwait(_SIGNALS) != signal.SIGHUP:
                break
            web.reload()
            settings = reload(exporter, settings, load) if load else settings
        notify_systemd("STOPPING=1")
        if server.stopped.is_set():
            raise TorchmemError(
                "the HTTP server stopped by itself: see the error above, then start it again."
            )


@contextmanager
def sending(exporter: Exporter, *, otlp: bool) -> Iterator[None]:
    """Send by OTLP until the end of the block, if the setting is on.

    Raises MissingExtraError, or UsageError for environment variables that cannot be used.
    """
    push = None
    if otlp:
        try:
            from torchmem.exporter.otlp import start
        except ModuleNotFoundError as error:
            raise MissingExtraError("exporter --otlp", error.name or "", "otlp") from error
        push = start(exporter)
    try:
        yield
    finally:
        if push:
            push.close(_LAST_SEND_SECONDS)


def reload(
    exporter: Exporter, settings: ExporterSettings, load: Callable[[], ExporterSettings]
) -> ExporterSettings:
    """Read the settings again, apply what a running exporter can change, and return them.

    Settings that cannot be used are logged, and `settings` stay in use.
    """
    try:
        loaded = load()
        loaded_thresholds = chosen(loaded.thresholds)
    except UsageError as error:
        _log.error("the configuration was not reloaded: %s", error)
        return settings
    exporter.configure(
        loaded.scrape_deadline_seconds,
        processes_per_gpu=loaded.processes_per_gpu,
        pcie_throughput=loaded.pcie_throughput,
        thresholds=loaded_thresholds,
        prices=loaded.prices,
    )
    names = [setting.name for setting in fields(ExporterSettings) if setting.name not in _RELOADED]
    changed = [name for name in names if getattr(loaded, name) != getattr(settings, name)]
    _log.info("the configuration was reloaded")
    if changed:
        _log.warning("restart the exporter to apply the new values of %s", ", ".join(changed))
    return replace(loaded, **{name: getattr(settings, name) for name in names})


def notify_systemd(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send a state, such as READY=1, to systemd; do nothing if systemd does not listen."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract socket
        address = address.replace("@", "\0", 1)
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
    ):
        sender.sendto(state.encode(), address)


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return how often systemd expects a sign of life (sd_watchdog_enabled(3)); None for never."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = environment.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) else None


def systemd_listener(environment: Mapping[str, str] = os.environ) -> socket.socket:
    """Return the listening socket that systemd opened for this process.

    Raises UsageError unless there is exactly one, and it is a TCP socket.
    """
    count = environment.get("LISTEN_FDS", "0")
    if environment.get("LISTEN_PID") != str(os.getpid()) or count != "1":
        raise UsageError(
            "systemd did not pass exactly one socket: "
            "start the exporter through a .socket unit with one address."
        )
    try:
        passed = socket.socket(fileno=_FIRST_DESCRIPTOR)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = 0
    if not listens or passed.family not in {socket.AF_INET, socket.AF_INET6}:
        raise UsageError(
            "systemd passed something other than a listening TCP socket: "
            "use ListenStream=HOST:PORT in its .socket unit."
        )
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    return passed
