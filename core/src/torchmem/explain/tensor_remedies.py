"""What to do where tensors need the memory: those of the model, of a step, and all others.

The components tell which of them hold it, and the call stack and the gradients whether the failed
request belongs to training. Only what is true of the case is advised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from torchmem.allocator.sizes import format_size
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.activity import is_copy, is_in_optimizer, is_loading, trains, updates_at_once
from torchmem.explain.call_stack import public_place
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedy import Remedy
from torchmem.explain.verdict import OnsetEvidence
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind

Kind = Literal["model", "step", "outputs", "others"]

SUBSTANTIAL = 0.2
"""The share of tensor memory from which a kind of tensors is worth a remedy."""
MOSTLY_ACTIVATIONS = 0.5
"""The share of tensor memory allocated within a step that points to activations."""
NEWEST_ENDS = 3
"""Ends of steps whose lowest memory shows what is kept; more of them would count a leak."""
MIN_MODEL_ALONE = 0.95
"""The share of tensor memory from which parameters are all that there is."""
MIN_KEPT_OUTPUTS = 16
"""Tensors of one shape with graphs that Python code must refer to at once to count as kept."""
MIN_LOADED = 0.9
"""The share of a loaded checkpoint that must be tensors other than the model's."""

MODEL = frozenset({"parameters", "gradients", "optimizer_state"})
OF_A_STEP = frozenset({"step", "gradients_or_step"})
NO_TENSORS = frozenset({"pending", "rounding"})
TRAINED = frozenset({"gradients", "gradients_or_step", "optimizer_state"})
"""Components that only training has."""

NO_GRAPHS = ("with torch.no_grad(): ...",)


def capacity(report: OomReport) -> Iterator[Remedy]:
    """Yield how the run needs less, by what holds the memory; what holds most comes first."""
    total = report.device.total_bytes
    if total is not None and (report.oom.requested_bytes or 0) > total:
        yield Remedy(
            "shape",
            "Check the line that failed: a tensor of that size most likely has a wrong shape.",
        )
        return
    yield from _unused_graphs(report)
    yield from loaded_checkpoint(report)
    if is_in_optimizer(report.origin):
        yield from optimizer_step(report)
    shares = tensor_shares(report)
    for kind in sorted(shares, key=lambda kind: -shares[kind]) if shares else _guess(report):
        # In an optimizer's step, the activations have been freed.
        is_gone = kind == "step" and is_in_optimizer(report.origin)
        if not is_gone and (shares is None or shares[kind] >= SUBSTANTIAL):
            yield from _BY_KIND[kind](report)


def _guess(report: OomReport) -> tuple[Kind, ...]:
    """Return what may hold the memory if neither components nor tensors are known."""
    within = _share_of_step(report)
    is_first = within is None or within >= MOSTLY_ACTIVATIONS
    return ("step", "model") if is_first else ("model", "step")


def tensor_shares(report: OomReport) -> dict[Kind, float] | None:
    """Return the shares of tensor memory by kind; None without components and tensors."""
    sizes = _tensor_sizes(report)
    total = sum(sizes.values())
    if not total:
        return _shares_in_python(report)
    model = sum(sizes[name] for name in sizes.keys() & MODEL)
    step = _share_of_step(report)
    if step is None:
        # No step has ended: autograd keeps the tensors that are not Python objects for this step.
        in_python = sum(group.bytes for group in report.tensors)
        step = (total - max(model, min(in_python, total))) / total
    return {"model": model / total, "step": step, "others": max(0.0, 1 - model / total - step)}


def _shares_in_python(report: OomReport) -> dict[Kind, float] | None:
    """Return the shares by the tensors that are Python objects; None if they are unknown.

    What is allocated beside them is kept by autograd, or was temporary: it belongs to the step.
    """
    allocator = report.device.allocator
    total = allocator.allocated_bytes.total if allocator else 0
    if not total or not report.tensors:
        return None
    sizes: dict[Kind, int] = {"model": 0, "outputs": 0, "others": 0, "step": 0}
    shapes = {group.shape for group in report.tensors if group.role == "parameter"}
    for group in report.tensors:
        # Gradients and optimizer state have the shapes of their parameters.
        kind: Kind = "model" if group.shape in shapes else _kind(group)
        if kind == "others" and is_inference(report) and group.count < MIN_KEPT_OUTPUTS:
            kind = "step"  # without graphs, outputs look like all other tensors
        sizes[kind] += group.bytes
    sizes["step"] += max(0, total - sum(sizes.values()))
    return {kind: size / max(total, sum(sizes.values())) for kind, size in sizes.items()}


def is_model_alone(report: OomReport) -> bool:
    """Return whether parameters filled the GPU, before a first step."""
    shares = None if report.steps.count else _shares_in_python(report)
    return shares is not None and shares["model"] >= MIN_MODEL_ALONE


def _kind(group: TensorGroup) -> Kind:
    if group.role == "parameter":
        return "model"
    if group.role == "output":
        return "outputs" if group.count >= MIN_KEPT_OUTPUTS else "step"
    return "others"


def _tensor_sizes(report: OomReport) -> dict[str, int]:
    """Return the bytes by component; those of the peak if they were read between two steps."""
    device = report.device
    is_within_step = bool(device.components.keys() & OF_A_STEP)
    sizes = device.components if is_within_step else device.component_peaks or device.components
    return {name: size for name, size in sizes.items() if name not in NO_TENSORS}


def _share_of_step(report: OomReport) -> float | None:
    """Return the share of tensor memory that was allocated within the step; None if unknown.

    If the components do not show it, the allocated memory is compared with what it was at the end
    of the newest steps: their lowest, as a part of them may have been kept.
    """
    sizes = _tensor_sizes(report)
    of_step = sum(sizes[name] for name in sizes.keys() & OF_A_STEP)
    if of_step and not report.steps.unread:
        return of_step / sum(sizes.values())
    allocator, history, trend = report.device.allocator, report.device.run_history, report.trend
    now = allocator.allocated_bytes.total if allocator else 0
    kept = history.allocated_bytes[-NEWEST_ENDS:] if history else ()
    rows = zip(trend.allocated_bytes, trend.steps, strict=True)
    kept = kept or tuple(size for size, steps in rows if size and steps)
    return max(0.0, 1 - min(kept) / now) if kept and now else None


def belongs_to_training(report: OomReport) -> bool:
    """Return whether training made the failed request, as far as that is known."""
    why = report.verdict.why if report.verdict else None
    if trains(report.origin):
        return True
    is_evaluation = why is not None and why.onset == "new_phase" and why.phase is not None
    return report.gradients_enabled is not False and not is_evaluation


def is_inference(report: OomReport) -> bool:
    """Return whether nothing shows that the process trains, and gradients were off."""
    return report.gradients_enabled is False and not _has_trained(report)


def _has_trained(report: OomReport) -> bool:
    components = report.device.components
    return trains(report.origin) or any(components.get(name) for name in TRAINED)


def _unused_graphs(report: OomReport) -> Iterator[Remedy]:
    """Yield what helps inference with gradients: requests, no step, and no onset."""
    is_idle = not report.steps.count and not _has_trained(report)
    if report.gradients_enabled and is_idle and report.oom.onset is None:
        yield Remedy("no_graphs", "If this is inference, do not record graphs.", NO_GRAPHS)


def loaded_checkpoint(report: OomReport) -> Iterator[Remedy]:
    """Yield how to load a checkpoint, if one that was read into GPU memory holds much of it."""
    lines = ('torch.load(path, map_location="cpu")',)
    if is_loading(report.origin):
        yield Remedy(
            "checkpoint_on_host",
            "Read the checkpoint into host memory, and copy it from there.",
            lines,
        )
        return
    sizes = _tensor_sizes(report)
    others = sum(size for name, size in sizes.items() if name not in MODEL)
    for use in report.lines.held if report.lines else ():
        if use.loads and MIN_LOADED * use.bytes <= others:
            yield Remedy(
                "checkpoint_on_host",
                f"{public_place(use.frame)[0]} reads a checkpoint into GPU memory, where it keeps "
                f"{format_size(use.bytes)}. Read it into host memory, and delete it after use.",
                lines,
            )
            return


def optimizer_step(report: OomReport) -> Iterator[Remedy]:
    """Yield what helps if an optimizer's step made the request."""
    if updates_at_once(report.origin):
        yield Remedy(
            "one_parameter",
            "The optimizer updates all parameters at once, for which it makes copies of them. "
            "Update one after the other, or in a fused kernel.",
            ("Optimizer(parameters, foreach=False)  # or fused=True",),
        )
    yield from _model(report)


def smaller(report: OomReport) -> Iterator[Remedy]:
    """Yield how a step or a call needs less."""
    if not belongs_to_training(report):
        yield smaller_calls()
        yield Remedy(
            "compute_in_16_bits",
            "Compute in 16 bits, unless that is so already.",
            ("with torch.autocast('cuda', dtype=torch.bfloat16): ...",),
        )
        return
    yield Remedy(
        "smaller_batch",
        "Use a smaller batch or shorter sequences, and accumulate gradients over several batches.",
    )
    yield Remedy(
        "recompute",
        "Recompute activations in the backward pass instead of storing them.",
        ("torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",),
    )
    yield Remedy(
        "activations_in_16_bits",
        "Store activations in 16 bits, unless they are already.",
        ("with torch.autocast('cuda', dtype=torch.bfloat16): ...",),
    )


def smaller_calls(gain: int | None = None) -> Remedy:
    """Return how a call that records no graph needs less."""
    return Remedy(
        "smaller_calls",
        "Use smaller batches or shorter sequences there, and do not keep outputs on the GPU.",
        ("outputs.append(output.cpu())",),
        gain_bytes=gain,
    )


def _model(report: OomReport) -> Iterator[Remedy]:
    world = report.process.world_size or 1
    ranks = f"the {world} ranks" if world > 1 else "several GPUs"
    if is_inference(report):
        text = f"Load the parameters in fewer bits, or spread the model over {ranks}."
        yield Remedy("fewer_bits", text)
        return
    how = f"over {ranks} (FSDP, ZeRO), or keep the optimizer state in host memory or in 8 bits."
    if tensor_shares(report):
        yield Remedy("shard", f"Shard parameters, gradients and optimizer state {how}")
    else:
        yield Remedy(
            "shard_if_large",
            f"If parameters, gradients and optimizer state hold the memory, shard them {how}",
        )


def _outputs(report: OomReport) -> Iterator[Remedy]:
    kept = max(
        (group for group in report.tensors if _kind(group) == "outputs"),
        key=lambda group: group.bytes,
    )
    yield Remedy(
        "kept_outputs",
        f"Python code refers to {kept.count:,} tensors of one shape and their graphs, "
        f"{format_size(kept.bytes)}. Find what keeps them: a list of outputs (append "
        "output.detach().cpu()), a sum of losses (use loss.item()), or a hook that stores "
        "activations.",
    )


def _others(report: OomReport) -> Iterator[Remedy]:
    share, allocator = (tensor_shares(report) or {}).get("others", 0.0), report.device.allocator
    total = sum(_tensor_sizes(report).values())
    if total:
        yield Remedy(
            "find_others",
            f"{format_size(round(share * total))} is held by tensors that belong neither to the "
            "model nor to this step. Find out what they are, such as a loaded checkpoint, a "
            "dataset, a second model, or a cache, and free them or keep them in host memory.",
        )
    elif allocator:
        yield Remedy(
            "host_inputs",
            f"{format_size(round(share * allocator.allocated_bytes.total))} is held by tensors "
            "that are neither parameters nor results of operations, such as a batch, a dataset, "
            "or a loaded checkpoint. Keep in host memory what this step does not need.",
        )


def leak(report: OomReport, why: OnsetEvidence) -> Iterator[Remedy]:
    """Yield what to look for if the tensors that are kept between steps grow."""
    known = _KEEPERS.get(why.component or "")
    if known:
        yield Remedy(known, f"{REMEDY_WORDS[known]}.", gain_bytes=why.bytes)
        return
    kind: RemedyKind = "find_kept"
    sums = "a sum of losses (use loss.item()), "
    hooks = ", a hook that stores activations"
    if is_inference(report):
        kind, sums, hooks = "find_kept_outputs", "", ""
    text = (
        f"Find what keeps tensors from step to step: {sums}a list of outputs (append "
        f"output.detach().cpu()), a cache without a bound{hooks}."
    )
    yield Remedy(kind, text, gain_bytes=why.bytes)


def larger_step(report: OomReport, why: OnsetEvidence) -> Iterator[Remedy]:
    """Yield what to do if steps need more, or one of them did."""
    if is_in_optimizer(report.origin):
        yield from optimizer_step(report)  # the batch has no part in it
        return
    graph = "" if is_inference(report) else ", or a graph that is kept over several backward passes"
    kind: RemedyKind = "find_larger_steps"
    if why.bytes_per_step is None:
        kind = "bounded_step"
        text = "Bound what one step can need: truncate or split the longest sequences or batches."
    else:
        text = (
            "Find out why steps need more and more: batches or sequences that get longer" + graph
        ) + "."
    yield Remedy(kind, text, gain_bytes=why.bytes)


def new_phase(report: OomReport, why: OnsetEvidence) -> Iterator[Remedy]:
    """Yield what to do about an evaluation, a save, or tensors that appeared."""
    if why.phase is None:
        yield from loaded_checkpoint(report)
        text = "Move what appeared then to host memory, or create it before the first step."
        yield Remedy("host_tensors", text, gain_bytes=why.bytes)
    elif is_copy(why.phase):
        yield Remedy(
            "copy_to_host",
            "Copy to host memory, one tensor after the other, instead of to the GPU.",
            ("state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}",),
            gain_bytes=why.bytes,
        )
    elif report.gradients_enabled:
        yield Remedy(
            "phase_without_graphs",
            "If gradients are not needed there, do not record graphs, and do not keep outputs on "
            "the GPU.",
            NO_GRAPHS,
            gain_bytes=why.bytes,
        )
    else:
        yield smaller_calls(why.bytes)


_BY_KIND: Mapping[Kind, Callable[[OomReport], Iterator[Remedy]]] = {
    "model": _model,
    "step": smaller,
    "outputs": _outputs,
    "others": _others,
}
_KEEPERS: Mapping[str, RemedyKind] = {
    "optimizer_state": "optimizer_grows",
    "parameters": "parameters_grow",
}
"""What to look for, by the component that grew."""
