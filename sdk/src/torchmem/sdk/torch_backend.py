"""PyTorch's CUDA caching allocator as a `Backend`: the only file of the SDK that imports torch.

The SDK imports this module lazily and gates every call on `is_initialized`; no call creates a
context. For PyTorch 2.1 and newer: functions that a version lacks are looked up, and their values
are absent there. Parts that depend on the version take the torch module as an argument.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch.cuda._utils import _get_device_index
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchmem.allocator.backend import Device, OomObserver, T, TraceEntry
from torchmem.allocator.settings import LAST_PARSED, parse_alloc_conf
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sample.sample import PinnedMemory
from torchmem.sdk._interruptions import ignore, is_interruption, shield
from torchmem.sdk._main_thread import PendingCalls
from torchmem.sdk._modules import SeenModules
from torchmem.sdk._peaks import MemoryModule, UserPeaks
from torchmem.sdk._tensors import TensorReader

C = TypeVar("C", bound=Callable[..., Any])

NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
# CudaMallocAsyncAllocator::getDeviceStats fills in these (c10/cuda/CUDAMallocAsyncAllocator.cpp,
# 2.13).
ASYNC_STATS = ("allocated_bytes", "active_bytes", "reserved_bytes")

# Events of PyTorch's history that say nothing about how much is requested.
SKIPPED_ACTIONS = ["free_requested", "segment_alloc", "segment_free", "oom", "snapshot"]
NO_POOL = 1 << 60

THRESHOLD = "garbage_collection_threshold"
# The memory fraction must be below 1. The driver keeps more than the rest for itself.
UNLIMITED_FRACTION = 0.9999
# PyTorch accepts only values below 1.
MAX_THRESHOLD = 0.999

_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = re.compile(f"GPU-{_UUID}")
# A compute instance, in the form of drivers from 470 on, and of older ones.
_MIG = re.compile(rf"MIG-({_UUID}|GPU-{_UUID}/\d+/\d+)")

_step_callbacks: list[Callable[[object], None]] = []
_step_begin_callbacks: list[Callable[[object, bool], None]] = []


@shield
def _call_step_callbacks(optimizer: object, *_: object) -> None:
    for callback in tuple(_step_callbacks):
        callback(optimizer)


@shield
def _call_step_begin_callbacks(
    optimizer: object, arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> None:
    has_closure = any(map(callable, (*arguments, *keywords.values())))
    for callback in tuple(_step_begin_callbacks):
        callback(optimizer, has_closure)


_modules = SeenModules(torch.nn.Module)


@shield
def _see_module(module: object, name: str, member: object) -> None:  # noqa: ARG001 - PyTorch's
    try:
        _modules.see(module)
    except Exception as error:
        if is_interruption(error):
            raise


# Never removed: PyTorch iterates over its hooks, and removing one meanwhile breaks the step.
register_optimizer_step_pre_hook(_call_step_begin_callbacks)
register_optimizer_step_post_hook(_call_step_callbacks)
register_module_parameter_registration_hook(_see_module)
register_module_module_registration_hook(_see_module)


class TorchBackend:
    """PyTorch's own allocator on every device where this process has a context."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._user_peaks: UserPeaks | None = None
        self._reader = AllocatorReader(torch, os.environ)
        self._collection = GarbageCollection(torch, self._reader)
        self._observer_code: CodeType | None = None
        self._pending = PendingCalls(partial(untraced, torch))

    def is_initialized(self) -> bool:
        """Return `torch.cuda.is_initialized()`, a Python flag that is False in forked children."""
        return bool(torch.cuda.is_initialized())

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the main thread between two bytecodes.

        There the thread is not in the driver and does not hold the allocator's mutex.
        """
        self._pending.add(call)

    def devices(self) -> Sequence[Device]:
        """Return devices with a context of this process (`torch._C._cuda_hasPrimaryContext`)."""
        has_context = torch._C._cuda_hasPrimaryContext  # noqa: SLF001
        present = [index for index in range(torch.cuda.device_count()) if has_context(index)]
        for index in present:
            if index not in self._devices:
                self._devices[index] = describe_device(torch, index, os.environ)
        return [self._devices[index] for index in present]

    def memory_stats(self, device: int) -> NestedStats | None:
        """Return the nested statistics that this backend keeps.

        The nested form costs an eighth of the flattened one.
        """
        if self._reader.backend() == "pluggable":
            return None
        read = (
            self._user_peaks.stats if self._user_peaks else torch.cuda.memory_stats_as_nested_dict
        )
        return self._reader.kept_stats(read(device))

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return all segments without traces.

        None if the allocator is not native, or if history is being recorded and this version of
        PyTorch cannot leave it out.
        """
        return self._reader.segments()

    def free_bytes(self, device: int) -> int | None:
        """Return the first value of `torch.cuda.mem_get_info` (cudaMemGetInfo)."""
        return int(torch.cuda.mem_get_info(device)[0])

    def pinned_memory(self) -> PinnedMemory | None:
        """Return `torch._C._cuda_hostMemoryStats()` (since 2.6); it makes no CUDA call.

        Up to 2.8 it names the bytes in use `allocated_bytes` and all bytes `reserved_bytes`.
        """
        read = getattr(torch._C, "_cuda_hostMemoryStats", None)  # noqa: SLF001
        if read is None:
            return None
        stats = read()
        names = ("active_bytes", "allocated_bytes")
        if "reserved_bytes" in stats:
            names = ("allocated_bytes", "reserved_bytes")
        used, total = (int(stats[name]["current"]) for name in names)
        return PinnedMemory(used, max(0, total - used))

    def limit_bytes(self, device: int) -> int | None:
        """Return the user's memory fraction (known since 2.6) of the device's total."""
        fraction, total = self._reader.fraction(device), self._devices[device].total_bytes
        if self._collection.is_own(device, fraction):
            fraction = 1.0
        return None if fraction is None or total is None else int(min(fraction, 1.0) * total)

    def world(self) -> tuple[int, int] | None:
        """Return the rank and the size of the default process group, which the script creates."""
        distributed = torch.distributed
        # Between the two calls another thread may destroy the group.
        with ignore(ValueError, RuntimeError):
            if distributed.is_available() and distributed.is_initialized():
                return distributed.get_rank(), distributed.get_world_size()
        return None

    def history_enabled(self) -> bool | None:
        """Return whether history is recorded; only the native allocator can record it."""
        return self._reader.history_enabled() if self._reader.backend() == "native" else None

    def start_history(self, max_entries: int) -> None:
        """Record allocations with Python stacks; resolving C++ frames would take minutes."""
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            enabled="all", context="alloc", stacks="python", max_entries=max_entries
        )

    def stop_history(self) -> None:
        """Stop recording and clear PyTorch's buffer."""
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001

    def start_stacks(self) -> None:
        """Record with `enabled="state"` (since 2.1), which keeps the stacks of live blocks only.

        The first snapshot with stacks imports torch._inductor, which torch.optim has mostly done
        (2.13, `py_symbolize`). Importing it here keeps that second out of the snapshots' account.
        """
        getattr(torch, "_inductor", None)
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            enabled="state", context="state", stacks="python", max_entries=1
        )
        self._reader.records_stacks = True

    def stop_stacks(self) -> None:
        """Stop recording, unless entries show that the script has started a recording since."""
        was_own = self._reader.has_own_recording()
        self._reader.records_stacks = False
        if was_own:
            self.stop_history()

    def start_trace(self, max_entries: int) -> bool:
        """Record allocations and completed frees without stacks, since 2.11."""
        reader = self._reader
        if reader.backend() != "native" or not reader.can_skip_traces or reader.history_enabled():
            return False
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            enabled="all",
            context=None,
            stacks="python",
            max_entries=max_entries,
            clear_history=True,
            skip_actions=SKIPPED_ACTIONS,
        )
        return True

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:
        """Stop recording, unless an entry has frames, and return what `use` makes of the entries.

        Python's garbage collector stays off meanwhile: it would scan a dict for each entry.
        """
        if not self._reader.history_enabled():
            return None
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            traces = self._reader.traces()
            if any("frames" in entry for trace in traces for entry in trace):
                return None
            self.stop_history()
            return use(traces)
        finally:
            traces = []
            if was_enabled:
                gc.enable()

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
        """Return `torch.cuda.memory._snapshot()`; without traces as `memory_snapshot` takes it."""
        if not traces:
            return self._reader.snapshot()
        if self._reader.backend() != "native":
            return None
        return cast("Mapping[str, Any]", torch.cuda.memory._snapshot())  # noqa: SLF001

    def empty_cache(self) -> None:
        """Empty the cache of all devices, except during the capture of a CUDA graph.

        A cudaFree would invalidate the capture.
        """
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Return `torch.cuda.is_current_stream_capturing()`."""
        return bool(torch.cuda.is_current_stream_capturing())

    def collect_above(self, shares: Mapping[int, float]) -> bool:
        """Set `garbage_collection_threshold`, which acts on devices with a memory fraction below 1.

        See `GarbageCollection`.
        """
        return self._collection.set(shares)

    def call_after_oom(self, call: Callable[[], None]) -> None:
        """Run `call` in the main thread as soon as the observer's frames are gone there."""
        if self._observer_code is None:
            raise RuntimeError("no observer is attached")
        self._pending.call_after(call, self._observer_code)

    def reset_peaks(self, device: int) -> None:
        """Call `reset_peak_memory_stats`, hidden from the user's `max_memory_*` by `UserPeaks`."""
        if self._user_peaks is None:
            modules = cast("tuple[MemoryModule, ...]", (torch.cuda.memory, torch.cuda))
            self._user_peaks = UserPeaks(
                modules, lambda given: int(_get_device_index(given, optional=True))
            )
        self._user_peaks.reset(device)

    def backward_node(self) -> str | None:
        """Return the name of the autograd node that runs in this thread, such as MmBackward0."""
        return backward_node(torch)

    def current_stream(self, device: int) -> int | None:
        """Return the handle of the current stream, without a CUDA call."""
        return int(torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001

    def allocator_settings(self) -> Mapping[str, str]:
        """Return what the allocator parsed, by the newest snapshot's settings (since 2.3)."""
        return self._reader.settings()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and of the CUDA or ROCm it was built for."""
        known = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
        }
        return {name: str(version) for name, version in known.items() if version}

    def on_init(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the end of CUDA's initialization (`torch.cuda._lazy_call`).

        It runs at once if CUDA is up.
        """
        if hasattr(torch._C, "_cuda_init"):  # noqa: SLF001
            torch.cuda._lazy_call(callback)  # noqa: SLF001

    def tensor_counter(self) -> TensorReader:
        """Return what finds the storages of the script's tensors."""
        return TensorReader(torch)

    def modules(self) -> SeenModules:
        """Return the modules that have registered something since this module was imported."""
        return _modules

    def on_step_begin(self, callback: Callable[[object, bool], None]) -> Callable[[], None]:
        """Run `callback` before every step of an optimizer of torch.optim, by a global hook."""
        _step_begin_callbacks.append(callback)

        def remove() -> None:
            if callback in _step_begin_callbacks:
                _step_begin_callbacks.remove(callback)

        return remove

    def on_step(self, callback: Callable[[object], None]) -> Callable[[], None]:
        """Run `callback` after every step of an optimizer of torch.optim, by a global post hook.

        Optimizers that exist already are included.
        """
        _step_callbacks.append(callback)

        def remove() -> None:
            if callback in _step_callbacks:
                _step_callbacks.remove(callback)

        return remove

    def on_oom(self, observer: OomObserver) -> None:
        """Attach `observer` for the life of the process.

        Only once CUDA is up: attaching it earlier would initialize the driver.
        """

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            try:
                limit = self._users_limit(device, limit)
                observer(device, requested, limit, driver_free)
            except BaseException as error:  # noqa: BLE001 - the observer counts its own errors
                self._raise_after_oom(error, callback.__code__)

        callback = untraced(torch, shield(observe))
        self._observer_code = callback.__code__
        if self._reader.backend() == "native":
            torch._C._cuda_attach_out_of_memory_observer(callback)  # noqa: SLF001

    def _users_limit(self, device: int, limit: int) -> int:
        """Return the observer's limit, without a memory fraction that is not the user's."""
        if not self._collection.is_own(device, self._reader.fraction(device)):
            return limit
        return self._devices[device].total_bytes or limit

    def _raise_after_oom(self, error: BaseException, callback: CodeType) -> None:
        """Have a signal handler's exception raised in the script after the OutOfMemoryError.

        An exception of the observer itself would replace that error. In other threads than the
        main one, where no signal handler runs, an asynchronous exception does replace it.
        """
        if not is_interruption(error):
            return
        if threading.current_thread() is not threading.main_thread():
            raise error
        try:
            self._pending.raise_after(error, callback)
        except RuntimeError:
            raise error from None


class AllocatorReader:
    """Reads the allocator, and omits what its backend does not keep and PyTorch fills with zeros.

    Supports torch from 2.1 on. Every call needs CUDA to be up.
    """

    def __init__(self, torch: Any, environment: Mapping[str, str]) -> None:
        self._torch = torch
        self._environment = environment
        self._settings: dict[str, str] | None = None
        self.records_stacks = False
        parameters = inspect.signature(torch.cuda.memory.memory_snapshot).parameters
        # Since 2.11; before, a snapshot always copies the user's whole recorded history.
        self.can_skip_traces = "include_traces" in parameters
        pool = (None,) if "mempool_id" in parameters else ()  # since 2.8
        self._arguments: tuple[object, ...] = ((0, 0, False),) if self.can_skip_traces else pool

    def backend(self) -> str:
        """Return `torch.cuda.get_allocator_backend()`: native, cudaMallocAsync, or pluggable."""
        return str(self._torch.cuda.get_allocator_backend())

    def kept_stats(self, stats: NestedStats) -> NestedStats | None:
        """Return the nested statistics that this backend counts, or None if it counts none."""
        if self.backend() == "cudaMallocAsync":
            kept = ((name, stats[name]["all"]) for name in ASYNC_STATS)
            return {
                name: {"all": {part: value[part] for part in ("current", "peak")}}
                for name, value in kept
            }
        if stats and stats["reserved_bytes"]["all"]["peak"] == 0 and self._is_caching_off():
            return None
        return stats or None

    def segments(self) -> list[SegmentInfo] | None:
        """Return all segments of a snapshot without traces, or None where there are none."""
        raw = self.snapshot()
        if raw is None:
            return None
        self._settings = settings_text(raw.get("allocator_settings", {}))
        segments = cast("list[SegmentInfo]", raw["segments"])
        if not segments and self._is_caching_off():
            self._settings["caching"] = "False"
            return None
        return segments

    def snapshot(self) -> Mapping[str, Any] | None:
        """Return the whole snapshot without traces.

        None if the allocator is not native, or while history is recorded that cannot be left out.
        """
        if self.backend() != "native" or (not self.can_skip_traces and self._has_long_history()):
            return None
        if self.can_skip_traces:
            add_references((0, 0, False))
        snapshot = self._torch._C._cuda_memorySnapshot(*self._arguments)  # noqa: SLF001
        if not self.can_skip_traces and _has_history(snapshot):
            self.records_stacks = False  # the script has started its own recording
        return cast("Mapping[str, Any]", snapshot)

    def _has_long_history(self) -> bool:
        return self.history_enabled() and not self.records_stacks

    def has_own_recording(self) -> bool:
        """Return whether history is recorded as `TorchBackend.start_stacks` has started it.

        Such a recording has at most one entry.
        """
        if not self.records_stacks or not self.history_enabled():
            return False
        return not _has_history(self._torch.cuda.memory._snapshot())  # noqa: SLF001

    def traces(self) -> list[list[TraceEntry]]:
        """Return the recorded history of each device, without any segment (since 2.11).

        Asks for the segments of a pool that does not exist.
        """
        arguments = (NO_POOL, NO_POOL, True)
        add_references(arguments)
        snapshot = self._torch._C._cuda_memorySnapshot(arguments)  # noqa: SLF001
        return cast("list[list[TraceEntry]]", snapshot["device_traces"])

    def history_enabled(self) -> bool:
        """Return `torch._C._cuda_isHistoryEnabled()` (since 2.1).

        Before CUDA is up that call would crash the process.
        """
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
        return bool(enabled()) if enabled else False

    def settings(self) -> dict[str, str]:
        """Return the backend's name and the settings in the newest snapshot (since 2.3).

        Takes a snapshot if there was none.
        """
        if self._settings is None:
            self.segments()
        return {**(self._settings or {}), "backend": self.backend()}

    def fraction(self, device: int) -> float | None:
        """Return `get_per_process_memory_fraction`, or None before 2.6, which lacks it."""
        read = getattr(self._torch.cuda.memory, "get_per_process_memory_fraction", None)
        return None if read is None else float(read(device))

    def _is_caching_off(self) -> bool:
        """Return whether allocations may bypass the cache, so that zero statistics mean nothing."""
        enabled = getattr(self._torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # noqa: SLF001
        return any(name in self._environment for name in NO_CACHING) or (
            enabled is not None and not enabled()
        )


class GarbageCollection:
    """Sets `garbage_collection_threshold` at run time, beside the settings that the user chose.

    PyTorch parses all settings anew, so that text is passed again. It collects only with a memory
    fraction below 1 (CUDACachingAllocator.cpp, 2.13, `garbage_collect_cached_blocks`). Since 2.6,
    where the user's own fraction can be read.
    """

    def __init__(self, torch: Any, reader: AllocatorReader) -> None:
        self._torch = torch
        self._reader = reader
        self._written: str | None = None
        self._users_text = ""
        self._devices: set[int] = set()

    def set(self, shares: Mapping[int, float]) -> bool:
        """Collect on these devices above the highest of the shares; return False if impossible."""
        text = self._text()
        if text is None or any(self._reader.fraction(device) is None for device in shares):
            return False
        for device in shares:
            if self._reader.fraction(device) == 1.0:
                self._torch.cuda.set_per_process_memory_fraction(UNLIMITED_FRACTION, device)
                self._devices.add(device)
        own = f"{THRESHOLD}:{max(shares.values(), default=MAX_THRESHOLD):g}"
        self._written = ",".join(filter(None, (text, own)))
        self._write(self._written)
        return True

    def is_own(self, device: int, fraction: float | None) -> bool:
        """Return whether a device's memory fraction is not the user's.

        PyTorch keeps it in bytes, so that it is not read exactly as it was set.
        """
        if fraction is None or device not in self._devices:
            return False
        return math.isclose(fraction, UNLIMITED_FRACTION, abs_tol=1e-6)

    def _text(self) -> str | None:
        """Return the user's settings; None if this allocator or those settings rule it out."""
        if self._reader.backend() != "native":
            return None
        current = self._read()
        if current != self._written:
            self._users_text = current
        conf = parse_alloc_conf(self._users_text)
        is_expandable = conf.get("expandable_segments", "").lower() == "true"
        return None if THRESHOLD in conf or is_expandable else self._users_text

    def _read(self) -> str:
        read = getattr(self._torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001
        if read is not None:
            return str(read())
        self._reader.segments()
        return self._reader.settings().get(LAST_PARSED, "")

    def _write(self, text: str) -> None:
        write = getattr(self._torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
        write = write or self._torch._C._cuda_cudaCachingAllocator_set_allocator_settings  # noqa: SLF001
        write(text)


def _has_history(snapshot: Mapping[str, Any]) -> bool:
    """Return whether a snapshot has more entries than a recording of stacks alone keeps."""
    return any(len(trace) > 1 for trace in snapshot.get("device_traces", ()))


def add_references(members: tuple[object, ...]) -> None:
    """Add a reference to each member of the tuple that `_cuda_memorySnapshot` is called with.

    PyTorch takes one reference from each at every call and never returns it (pytorch/pytorch, pull
    request 196366). Before Python 3.12, which made such objects immortal, `False` would have no
    reference left after about 20,000 snapshots, or two days, and Python would abort the training.
    Where PyTorch is correct, one reference too many does no harm.
    """
    if sys.version_info < (3, 12):
        for member in members:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(member))


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a snapshot's settings as text by lower-case name.

    Includes settings that were parsed but are missing in the snapshot. PyTorch's −1, which means
    "unlimited", is left out, and so is what was not set.
    """
    flat = {
        name.lower(): str(value)
        for name, value in settings.items()
        if not isinstance(value, dict) and value != -1
    }
    divisions = settings.get("roundup_power2_divisions", {})
    flat["roundup_power2_divisions"] = ",".join(
        f"{size}:{count}" for size, count in divisions.items() if count
    )
    parsed = parse_alloc_conf(flat.get(LAST_PARSED, ""))
    parsed.pop("max_split_size_mb", None)
    return {name: text for name, text in (parsed | flat).items() if text}


def describe_device(torch: Any, index: int, environment: Mapping[str, str]) -> Device:
    """Return name, UUID, and bytes of torch's device `index`, from its own properties."""
    properties = torch.cuda.get_device_properties(index)
    uuid = device_uuid(torch, index, properties, environment)
    return Device(index, uuid, str(properties.name), int(properties.total_memory))


def device_uuid(
    torch: Any, index: int, properties: Any, environment: Mapping[str, str]
) -> str | None:
    """Return the UUID as NVML or rocminfo writes it, or None if it could be another card's.

    A MIG slice is identified by CUDA_VISIBLE_DEVICES alone. Otherwise the device's own property
    (since torch 2.5) is right under every CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = entries[index] if index < len(entries) else ""
    if entry.startswith("MIG-") or " MIG " in str(properties.name):
        return entry if _MIG.fullmatch(entry) else None
    own = getattr(properties, "uuid", None)
    if getattr(torch.version, "hip", None):
        return None if own is None else _hip_uuid(str(own))
    if own is not None:
        return f"GPU-{str(own).removeprefix('GPU-')}"
    return entry if _GPU.fullmatch(entry) else _uuid_by_index(torch, index, entry, environment)


def _hip_uuid(text: str) -> str | None:
    """Convert torch's UUID of a ROCm device to rocminfo's 16 digits.

    HIP keeps these digits as characters, and torch writes the bytes of those in hexadecimal.
    """
    with ignore(ValueError):
        digits = bytes.fromhex(text.replace("-", "")).decode("ascii")
        return f"GPU-{digits}" if re.fullmatch("[0-9a-f]{16}", digits) else None
    return None


def _uuid_by_index(
    torch: Any, index: int, entry: str, environment: Mapping[str, str]
) -> str | None:
    """Look the UUID up in NVML's list, before torch 2.5, if its order is CUDA's or irrelevant."""
    try:
        uuids: list[str] = torch.cuda._raw_device_uuid_nvml() or []  # noqa: SLF001
        if len(uuids) == 1:
            return uuids[0]
        if entry.startswith("GPU-"):
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
            return matches[0] if len(matches) == 1 else None
        if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return uuids[int(torch.cuda._get_nvml_device_index(index))]  # noqa: SLF001
    except Exception as error:
        if is_interruption(error):
            raise
    return None


def backward_node(torch: Any) -> str | None:
    """Return the name of `torch._C._current_autograd_node()` (2.13); "" where it is not known.

    None unless `_current_graph_task_id()` shows a backward pass in this thread.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    if task is None or task() == -1:
        return None
    current = getattr(torch._C, "_current_autograd_node", None)  # noqa: SLF001
    node = current() if current else None
    return "" if node is None else str(node.name())


def untraced(torch: Any, function: C) -> C:
    """Return `function` such that TorchDynamo ignores it and all that it calls.

    The SDK's callbacks interrupt compiled code at any place. Does not import torch._dynamo: uses
    `torch._C._dynamo.eval_frame` (torch/csrc/dynamo/eval_frame.c), there
    `set_code_exec_strategy`, and in older versions `skip_code`, which covers one frame only, so
    that the calls below it run without Dynamo's callback.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)  # noqa: SLF001
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        strategy = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, strategy)
        return function
    return _without_callback(frames, function) if hasattr(frames, "skip_code") else function


def _without_callback(frames: Any, function: C) -> C:
    def wrapper(*arguments: object) -> object:
        prior = frames.set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            frames.set_eval_frame(prior)

    frames.skip_code(wrapper.__code__)
    return wrapper  # type: ignore[return-value]
