"""What the active bytes consisted of at their peak.

A read before an optimizer's step and one after it show in which of the two halves of a step the
peak was reached. During the optimizer's step all gradients exist. Before it, any number of them may
exist; then only a recording of one step (`step_trace`) tells gradients apart from the step's other
allocations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torchmem.sample.sample import PASSING
from torchmem.sdk.components.optimizers import Bytes
from torchmem.sdk.components.step_trace import StepPeak

Values = Mapping[str, int]
"""Bytes by component."""
_MODEL = ("parameters", "optimizer_state")


class ComponentPeaks:
    """The components of the peak of requested bytes, by device.

    A peak that is reached before the components of a step are known stays unknown, until a higher
    one or a recorded step with the same peak.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._known: dict[int, tuple[Values, float]] = {}
        self._lasting: Mapping[int, Values] = {}
        self._gradients: Bytes | None = None

    def before_optimizer(self, peaks: Bytes, gradients: Bytes | None) -> None:
        """Take the peaks so far, and the gradients if all of them exist now.

        `gradients` is None if an optimizer's step also runs forward and backward passes.
        """
        for device in self._risen(peaks):
            self._set(device, self._before(device))
        self._gradients = gradients

    def at_step(self, peaks: Bytes, values: Mapping[int, Values]) -> None:
        """Take the peaks so far and the components at a step's end."""
        for device in self._risen(peaks):
            is_known = self._has_same_model(device, values.get(device))
            self._set(device, self._in_step(device) if is_known else {})
        self._lasting, self._gradients = values, None

    def in_recorded_step(self, device: int, peak: StepPeak, values: Values | None) -> None:
        """Take the peak of a step, and the components at its end, before `at_step`.

        It counts if no step had a higher one.
        """
        is_known = self._has_same_model(device, values)
        if is_known and peak.requested >= self._peaks.get(device, 0):
            self._peaks[device] = peak.requested
            known = {"gradients": peak.gradients}
            before = self._lasting[device]
            held = before.get("held", 0) - max(0, peak.released - before.get("pending", 0))
            if held >= 0:
                known["held"] = held
            self._set(device, self._with_rest(device, known, "step"))

    def is_exact(self, device: int) -> bool:
        """Whether gradients and step can be told apart."""
        return "step" in self._known.get(device, ({}, 0.0))[0]

    def values(
        self, device: int, requested_peak: int, active_peak: int
    ) -> tuple[dict[str, int], float | None]:
        """Return the components, which add up to the active peak, and the time of their step.

        Both peaks are from one read. The components are unknown if the requested peak has risen
        since the latest step that was read.
        """
        values, timestamp = self._known.get(device, ({}, 0.0))
        known = self._peaks.get(device, 0)
        if not values or requested_peak > known or active_peak < known:
            return {}, None
        return {**values, "rounding": active_peak - known}, timestamp

    def _risen(self, peaks: Bytes) -> list[int]:
        risen = [device for device, peak in peaks.items() if peak > self._peaks.get(device, 0)]
        self._peaks |= {device: peaks[device] for device in risen}
        return risen

    def _set(self, device: int, values: Values) -> None:
        self._known[device] = values, time.time()

    def _has_same_model(self, device: int, values: Values | None) -> bool:
        """Return whether parameters and states are the same as in the previous step."""
        before = self._lasting.get(device, {})
        return values is not None and all(values.get(n) == before.get(n) for n in _MODEL)

    def _before(self, device: int) -> Values:
        """Return the components of a peak before the optimizer's step, gradients unknown."""
        has_gradients = "gradients" in self._lasting.get(device, {})
        return self._with_rest(device, {}, "gradients_or_step" if has_gradients else "step")

    def _in_step(self, device: int) -> Values:
        if self._gradients is None:
            return self._before(device)
        return self._with_rest(device, {"gradients": self._gradients.get(device, 0)}, "step")

    def _with_rest(self, device: int, known: Values, rest_name: str) -> Values:
        """Return what lasts, what is known, and the rest of the peak; {} if that is too much."""
        values = {**_lasting(self._lasting.get(device)), **known}
        rest = self._peaks[device] - sum(values.values())
        return {**values, rest_name: rest} if self._lasting.get(device) and rest >= 0 else {}


def _lasting(values: Values | None) -> dict[str, int]:
    return {name: size for name, size in (values or {}).items() if name not in PASSING}
