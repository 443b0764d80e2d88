"""What following a piece of advice means for a job: settings, or the twin of its script."""

from __future__ import annotations

import re

from torchmem.explain.remedy import Remedy

FRACTION = re.compile(r"set_per_process_memory_fraction\(([\d.]+)")
TWINS = (
    ("keeps tensors from step to step", "drop"),
    ("tensors of one shape and their graphs", "drop"),
    ("Find out why the optimizer state grows", "drop"),
    ("Find out why the parameters grow", "drop"),
    ("Do not store exceptions", "drop"),
    ("Break the reference cycle", "break_cycle"),
    ("collect every few steps", "collect"),
    ("Bound what one step can need", "bound"),
    ("Find out why steps need more and more", "bound"),
    ("do not record graphs", "no_grad"),
    ("Use smaller batches or shorter sequences there", "smaller"),
    ("Use a smaller batch", "smaller"),
    ("Leave more memory free", "smaller"),
    ("Update one after the other", "foreach"),
    ("(FSDP, ZeRO)", "shard"),
    ("Load the parameters in fewer bits", "shard"),
    ("Move what appeared then to host memory", "host"),
    ("Copy to host memory", "host"),
    ("belong neither to the model nor to this step", "host"),
    ("Keep in host memory what this step does not need", "host"),
    ("Read the checkpoint into host memory", "host"),
    ("reads a checkpoint into GPU memory", "host"),
    ("Find out what took memory outside", "outside"),
    ("Find out what holds the memory", "outside"),
    ("Stop it, move this run", "outside"),
    ("Let CUDA graphs share one pool", "share_pool"),
    ("Let other allocations use the memory of a MemPool", "use_on_oom"),
    ("Catch torch.OutOfMemoryError", "repeat"),
    ("Wait for the other stream", "wait"),
    ("Recompute activations", "recompute"),
    ("in 16 bits", "half"),
    ("Allocate large tensors on one stream", "one_stream"),
    ("was in whole segments", "empty_cache"),
    ("has a wrong shape", "shape"),
)
"""Words of a remedy, and the twin that follows it, which a script asks for by `Job.cured`.

A script without that twin runs unchanged, as the advice is not about what it does.
"""


def followed(remedy: Remedy | None) -> dict[str, str]:
    """Return the environment variables with which a job follows a remedy; none without one."""
    if remedy is None:
        return {}
    if remedy.setting:
        return {"PYTORCH_ALLOC_CONF": f"{remedy.setting}:{remedy.value}"}
    if found := FRACTION.search(" ".join(remedy.lines)):
        return {"VERDICT_FRACTION": found[1]}
    return {"VERDICT_CURE": _twin(remedy.text)}


def _twin(text: str) -> str:
    names = [name for words, name in TWINS if words in text]
    if not names:
        raise LookupError(f"no twin is known for this advice: {text}")
    return names[0]
