"""What an OOM report says of lines and tensors beyond their sizes, at a bounded cost."""

from __future__ import annotations

import time
from dataclasses import replace

from torchmem.allocator.backend import Backend
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.lines import divided
from torchmem.sdk.oom.module_names import ModuleNames
from torchmem.sdk.oom.observation import OomObservation
from torchmem.sdk.safety.cost import OOM_DETAILS_BUDGET, OOM_DETAILS_RESERVE_SECONDS, Allowance


class OomDetails:
    """Adds details while the allowance lasts; a batch-size search has an OOM for each size."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._allowance = Allowance(OOM_DETAILS_BUDGET, OOM_DETAILS_RESERVE_SECONDS)

    def divide(self, observation: OomObservation) -> OomObservation:
        """Divide what the lines hold by caller, and by module where it is known."""
        found, segments = observation.lines, observation.segments
        if found is None or segments is None or not self._has_time():
            return observation
        started, modules = time.thread_time(), self._backend.modules()
        module_of = ModuleNames(modules).of if modules else lambda _frames: None
        found = divided(found, segments, observation.device, module_of)
        self._spend(started)
        return replace(observation, lines=found)

    def tensors(self, device: int) -> tuple[TensorGroup, ...]:
        """Return the tensors that are Python objects, in groups; empty if that is not known."""
        if not self._has_time():
            return ()
        started = time.thread_time()
        found = self._backend.python_tensors(device)
        self._spend(started)
        return found or ()

    def _has_time(self) -> bool:
        return self._allowance.is_left(time.perf_counter(), resuming=False)

    def _spend(self, started: float) -> None:
        self._allowance.spend(time.perf_counter(), time.thread_time() - started)
