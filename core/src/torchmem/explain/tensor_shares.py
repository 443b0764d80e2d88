"""What holds the tensor memory at an OutOfMemoryError: the model, the step, or something else.

The components of the newest steps tell it. Before a step has ended, the tensors that are Python
objects do.
"""

from __future__ import annotations

from typing import Literal

from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.activity import trains
from torchmem.explain.oom_report import OomReport

TensorKind = Literal["model", "step", "outputs", "others"]
"""Parameters, gradients and optimizer state; what the step allocated; outputs with graphs that
Python code keeps; all other tensors."""

NEWEST_ENDS = 3
"""Ends of steps whose lowest memory shows what is kept; more of them would count a leak."""
MIN_MODEL_ALONE = 0.95
"""The share of tensor memory from which parameters are all that there is."""
MIN_KEPT_OUTPUTS = 16
"""Tensors of one shape with graphs that Python code must refer to at once to count as kept."""
MODEL = frozenset({"parameters", "gradients", "optimizer_state"})
OF_A_STEP = frozenset({"step", "gradients_or_step"})
NO_TENSORS = frozenset({"pending", "rounding"})
TRAINED = frozenset({"gradients", "gradients_or_step", "optimizer_state"})
"""Components that only training has."""


def tensor_shares(report: OomReport) -> dict[TensorKind, float] | None:
    """Return the shares of tensor memory by kind; None without components and tensors."""
    sizes = component_sizes(report)
    total = sum(sizes.values())
    if not total:
        return _shares_in_python(report)
    model = sum(sizes[name] for name in sizes.keys() & MODEL)
    step = share_of_step(report)
    if step is None:
        # No step has ended: autograd keeps the tensors that are not Python objects for this step.
        in_python = sum(group.bytes for group in report.tensors)
        step = (total - max(model, min(in_python, total))) / total
    return {"model": model / total, "step": step, "others": max(0.0, 1 - model / total - step)}


def _shares_in_python(report: OomReport) -> dict[TensorKind, float] | None:
    """Return the shares by the tensors that are Python objects; None if they are unknown.

    What is allocated beside them is kept by autograd, or was temporary: it belongs to the step.
    """
    allocator = report.device.allocator
    total = allocator.allocated_bytes.total if allocator else 0
    if not total or not report.tensors:
        return None
    sizes: dict[TensorKind, int] = {"model": 0, "outputs": 0, "others": 0, "step": 0}
    shapes = {group.shape for group in report.tensors if group.role == "parameter"}
    for group in report.tensors:
        kind = _kind(group)
        if group.shape is None:
            continue  # the rest of the groups: what these tensors are is unknown
        if kind == "others" and group.shape in shapes:
            kind = "model"  # gradients and optimizer state have the shapes of their parameters
        elif kind == "others" and is_inference(report) and group.count < MIN_KEPT_OUTPUTS:
            kind = "step"  # without graphs, outputs look like all other tensors
        sizes[kind] += group.bytes
    sizes["step"] += max(0, total - sum(sizes.values()))
    return {kind: size / max(total, sum(sizes.values())) for kind, size in sizes.items()}


def is_model_alone(report: OomReport) -> bool:
    """Return whether parameters, without gradients, filled the GPU before a first step."""
    allocator = report.device.allocator
    total = allocator.allocated_bytes.total if allocator else 0
    parameters = sum(group.bytes for group in report.tensors if group.role == "parameter")
    return not report.steps.count and parameters >= MIN_MODEL_ALONE * total > 0


def kept_outputs(report: OomReport) -> TensorGroup:
    """Return the largest group of outputs that Python code keeps. Raise ValueError without any."""
    kept = (group for group in report.tensors if _kind(group) == "outputs")
    return max(kept, key=lambda group: group.bytes)


def _kind(group: TensorGroup) -> TensorKind:
    if group.role == "parameter":
        return "model"
    if group.role == "output":
        return "outputs" if group.count >= MIN_KEPT_OUTPUTS else "step"
    return "others"


def component_sizes(report: OomReport) -> dict[str, int]:
    """Return the bytes by component; those of the peak if they were read between two steps."""
    device = report.device
    is_within_step = bool(device.components.keys() & OF_A_STEP)
    sizes = device.components if is_within_step else device.component_peaks or device.components
    return {name: size for name, size in sizes.items() if name not in NO_TENSORS}


def share_of_step(report: OomReport) -> float | None:
    """Return the share of tensor memory that was allocated within the step; None if unknown.

    If the components do not show it, the allocated memory is compared with what it was at the end
    of the newest steps: their lowest, as a part of them may have been kept.
    """
    sizes = component_sizes(report)
    of_step = sum(sizes[name] for name in sizes.keys() & OF_A_STEP)
    if of_step and not report.steps.unread:
        return of_step / sum(sizes.values())
    allocator, history, trend = report.device.allocator, report.device.run_history, report.trend
    now = allocator.allocated_bytes.total if allocator else 0
    kept = history.allocated_bytes[-NEWEST_ENDS:] if history else ()
    rows = zip(trend.allocated_bytes, trend.steps, strict=True)
    kept = kept or tuple(size for size, steps in rows if size and steps)
    return max(0.0, 1 - min(kept) / now) if kept and now else None


def is_inference(report: OomReport) -> bool:
    """Return whether nothing shows that the process trains, and gradients were off."""
    return report.gradients_enabled is False and not has_trained(report)


def has_trained(report: OomReport) -> bool:
    """Return whether the process has gradients or optimizer state, or asked in training."""
    components = report.device.components
    return trains(report.origin) or any(components.get(name) for name in TRAINED)
