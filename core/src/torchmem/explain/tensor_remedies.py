"""What to do where tensors need the memory: those of the model, of a step, and all others.

The components tell which of them hold it, and the call stack and the gradients whether the failed
request belongs to training. Only what is true of the case is advised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torchmem.allocator.sizes import format_size
from torchmem.explain.activity import is_copy, is_in_optimizer, is_loading, trains, updates_at_once
from torchmem.explain.call_stack import public_place
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedy import Remedy
from torchmem.explain.tensor_shares import (
    MODEL,
    TensorKind,
    component_sizes,
    has_trained,
    is_inference,
    kept_outputs,
    share_of_step,
    tensor_shares,
)
from torchmem.explain.verdict import OnsetEvidence
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind

SUBSTANTIAL = 0.2
"""The share of tensor memory from which a kind of tensors is worth a remedy."""
MOSTLY_ACTIVATIONS = 0.5
"""The share of tensor memory allocated within a step that points to activations."""
MIN_LOADED = 0.9
"""The share of a loaded checkpoint that must be tensors other than the model's."""

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


def _guess(report: OomReport) -> tuple[TensorKind, ...]:
    """Return what may hold the memory if neither components nor tensors are known."""
    within = share_of_step(report)
    is_first = within is None or within >= MOSTLY_ACTIVATIONS
    return ("step", "model") if is_first else ("model", "step")


def belongs_to_training(report: OomReport) -> bool:
    """Return whether training made the failed request, as far as that is known."""
    why = report.verdict.why if report.verdict else None
    if trains(report.origin):
        return True
    is_evaluation = why is not None and why.onset == "new_phase" and why.phase is not None
    return report.gradients_enabled is not False and not is_evaluation


def _unused_graphs(report: OomReport) -> Iterator[Remedy]:
    """Yield what helps inference with gradients: requests, no step, and no onset."""
    is_idle = not report.steps.count and not has_trained(report)
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
    sizes = component_sizes(report)
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
    kept = kept_outputs(report)
    others = ", a sum of losses (use loss.item()), or a hook that stores activations"
    yield Remedy(
        "kept_outputs",
        f"Python code refers to {kept.count:,} tensors of one shape and their graphs, "
        f"{format_size(kept.bytes)}. Find what keeps them: a list of outputs (append "
        f"output.detach().cpu()){'' if is_inference(report) else others}.",
    )


def _others(report: OomReport) -> Iterator[Remedy]:
    share, allocator = (tensor_shares(report) or {}).get("others", 0.0), report.device.allocator
    total = sum(component_sizes(report).values())
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


_BY_KIND: Mapping[TensorKind, Callable[[OomReport], Iterator[Remedy]]] = {
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
