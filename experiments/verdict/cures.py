"""What following a piece of advice means for a job: settings, or the twin of its script."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchmem.explain.remedy import Remedy
from torchmem.sample.remedy_words import RemedyKind

FRACTION = re.compile(r"set_per_process_memory_fraction\(([\d.]+)")
TWINS: Mapping[RemedyKind, str] = {
    "find_kept": "drop",
    "find_kept_outputs": "drop",
    "kept_outputs": "drop",
    "optimizer_grows": "drop",
    "parameters_grow": "drop",
    "stored_exceptions": "drop",
    "cycle": "break_cycle",
    "collect": "collect",
    "bounded_step": "bound",
    "find_larger_steps": "bound",
    "no_graphs": "no_grad",
    "phase_without_graphs": "no_grad",
    "smaller_calls": "smaller",
    "smaller_batch": "smaller",
    "more_free": "smaller",
    "one_parameter": "foreach",
    "shard": "shard",
    "shard_if_large": "shard",
    "fewer_bits": "shard",
    "host_tensors": "host",
    "copy_to_host": "host",
    "find_others": "host",
    "host_inputs": "host",
    "checkpoint_on_host": "host",
    "find_outside": "outside",
    "find_processes": "outside",
    "other_gpu": "outside",
    "shared_pool": "share_pool",
    "pool_on_oom": "use_on_oom",
    "repeat": "repeat",
    "wait": "wait",
    "recompute": "recompute",
    "activations_in_16_bits": "half",
    "compute_in_16_bits": "half",
    "one_stream": "one_stream",
    "empty_cache": "empty_cache",
    "shape": "shape",
}
"""The twin that follows a remedy, which a script asks for by `Job.cured`.

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
    if remedy.kind is None or remedy.kind not in TWINS:
        raise LookupError(f"no twin is known for this advice: {remedy.text}")
    return {"VERDICT_CURE": TWINS[remedy.kind]}
