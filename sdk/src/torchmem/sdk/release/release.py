"""`Release`: returns memory to the driver, by the tiers of the setting `release` and on request."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmem.sample.release_messages import ReleaseRequest
from torchmem.sample.release_tiers import SETTING_TIERS, ReleaseTier
from torchmem.sdk.draft import Draft
from torchmem.sdk.engine import EnginePart
from torchmem.sdk.observation import Oom
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.cache import Cache, Released
from torchmem.sdk.release.device_release import DeviceRelease, DeviceReleases
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.release.tiers import ACTIONS
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import Settings


class ReleaseRefusedError(Exception):
    """A request for memory that is not granted; the text is the reason, in one sentence."""


class Release:
    """Releases memory in the training thread, at step ends that have just read statistics.

    `reset_peaks` starts a new window of the peaks. While the `engine` of this process falls asleep
    or wakes up, nothing is released.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        recorder: Recorder,
        errors: Errors,
        settings: Settings,
        reset_peaks: Callable[[], None],
        hooks: PressureHooks,
        engine: EnginePart,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self.backend = recorder.backend
        self.errors = errors
        self.hooks = hooks
        self.devices = DeviceReleases(recorder)
        self.cache = Cache(self.devices, hooks, reset_peaks)
        tiers = settings.release or {}
        self._actions = [
            action(tiers[action.tier], self.cache, errors)
            for action in ACTIONS
            if action.tier in tiers
        ]
        self._interval = settings.release_interval
        self._due = 0.0

    def has(self, tier: ReleaseTier) -> bool:
        """Return whether the setting names this tier."""
        return any(action.tier == tier for action in self._actions)

    @property
    def must_not_release(self) -> bool:
        """Whether a hook runs now, which must cause no release, or the engine moves its memory."""
        return self.hooks.is_running or self._engine.is_moving

    @property
    def note(self) -> str | None:
        """What this process holds besides, and how to free it; None if there is nothing to say."""
        return self._engine.note

    @property
    def asleep_bytes(self) -> int:
        """What the engine of this process takes when it wakes up."""
        return self._engine.asleep_bytes

    def at_step(self) -> None:
        """End a window on each device; if one is short of memory, release where that pays."""
        if not self._actions or self.must_not_release:
            return
        devices = self.devices.by_index()
        if any(action.needs_peaks for action in self._actions):
            self.cache.reset_peaks()
        for device in devices.values():
            self._end_window(device)
        if time.perf_counter() >= self._due and not self.backend.is_capturing():
            self._relieve(devices)

    def _end_window(self, device: DeviceRelease) -> None:
        for action in self._actions:
            device.account(action.tier)
        device.end_window()
        for action in self._actions:
            action.end_window(device)

    def _relieve(self, devices: dict[int, DeviceRelease]) -> None:
        for action in self._actions:
            short = {
                index: device
                for index, device in devices.items()
                if action.acts_when_short and device.is_below(action.tier, action.share)
            }
            if short:
                self._due = time.perf_counter() + self._interval
                if action.relieve(short):
                    return

    def at_oom(self, oom: Oom) -> None:
        """Let each tier act, for the OOM observer."""
        for action in self._actions:
            action.at_oom(oom)

    def complete(self, sample: Draft) -> None:
        """Add what the releases did."""
        known = self.devices.by_index()
        for device in sample.devices:
            if device.index in known:
                known[device.index].complete(device)
        sample.add(hooks_dropped=dict(self.hooks.dropped))

    def on_request(self, request: ReleaseRequest) -> Released:
        """Return what can be spared, at a step's end.

        A neighbor gets nothing that the next step is expected to need, by the latest window; except
        a neighbor whose engine wakes up and that asks for what hooks can free. Raises
        ReleaseRefusedError.
        """
        self._check(request)
        if request.asker != "neighbors":
            return self.cache.release(request.asker, request.hook_bytes)
        if request.hook_bytes and self.hooks.exist:
            return self.cache.release("neighbors", request.hook_bytes)
        segments = self.cache.snapshot()
        devices = self.cache.memory(self.devices.by_index(), segments, windows=1)
        if not any(memory.can_spare for memory in devices.values()):
            raise ReleaseRefusedError("its next step is expected to need its cache.")
        kept = self.cache.needed_blocks(segments, devices)
        return self.cache.release("neighbors", kept=kept)

    def by_script(self, wanted: int) -> int:
        """Call hooks for the wanted bytes, empty the cache, and return the bytes returned."""
        if self.must_not_release or self.backend.is_capturing():
            return 0
        self._recorder.read_stats()
        return sum(self.cache.release("request", wanted)[0].values())

    def while_idle(self, request: ReleaseRequest) -> Released:
        """Empty the cache of a process without steps, in its main thread.

        Calls no hooks. Raises ReleaseRefusedError.
        """
        self._check(request)
        self._check_promises(request)
        return self.cache.release(request.asker)

    def beside_main_thread(self, request: ReleaseRequest) -> Released:
        """Do what `while_idle` does in another thread, while the main thread does nothing.

        Emptying the cache waits for the allocator without the GIL. The statistics, which would wait
        with it, are read only after that.
        """
        self._check(request)
        self._check_promises(request)
        devices = self.devices.by_index()
        reserved = {index: device.known_reserved() for index, device in devices.items()}
        return self.cache.release(request.asker, reserved=reserved)

    def _check(self, request: ReleaseRequest) -> None:
        if self.backend.is_capturing():
            raise ReleaseRefusedError("a CUDA graph is being captured.")
        if request.asker in SETTING_TIERS and not self.has(request.asker):
            raise ReleaseRefusedError(f"its setting release does not name {request.asker}.")

    def _check_promises(self, request: ReleaseRequest) -> None:
        if request.asker == "neighbors" and any(each.is_promised for each in self.devices.all()):
            raise ReleaseRefusedError("it has waited for this memory and is about to need it.")
