"""What helps against an OutOfMemoryError: each remedy in one line.

Metrics, alerts, dashboards and the fleet's report say these lines. The reports of one rank say the
same with its numbers and what to type, see `explain/remedies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

RemedyKind = Literal[
    "expandable_segments",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "max_split_size_mb",
    "large_segment_size_mb",
    "early_tensors",
    "empty_cache",
    "one_stream",
    "shared_pool",
    "pool_on_oom",
    "more_free",
    "raised_limit",
    "driver_limit",
    "page_cache",
    "repeat",
    "wait",
    "find_processes",
    "dead_processes",
    "set_device",
    "assigned_empty",
    "other_gpu",
    "shared_gpu",
    "cache_for_libraries",
    "room_for_libraries",
    "last_error",
    "cycle",
    "stored_exceptions",
    "collect",
    "find_outside",
    "fewer_communicators",
    "suspend_communicators",
    "shape",
    "no_graphs",
    "checkpoint_on_host",
    "one_parameter",
    "smaller_batch",
    "recompute",
    "activations_in_16_bits",
    "smaller_calls",
    "compute_in_16_bits",
    "shard",
    "shard_if_large",
    "fewer_bits",
    "find_others",
    "host_inputs",
    "kept_outputs",
    "find_kept",
    "find_kept_outputs",
    "optimizer_grows",
    "parameters_grow",
    "bounded_step",
    "find_larger_steps",
    "host_tensors",
    "copy_to_host",
    "phase_without_graphs",
    "kv_cache",
    "fewer_requests",
    "fewer_graphs",
    "fewer_adapters",
    "before_wake_up",
    "weights_first",
    "smaller_engine",
    "host_memory",
    "signal",
]

REMEDY_WORDS: Mapping[RemedyKind, str] = {
    "expandable_segments": (
        "Enable expandable segments: expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF "
        "(PYTORCH_ALLOC_CONF from PyTorch 2.10 on)"
    ),
    "roundup_power2_divisions": (
        "If tensor sizes vary from step to step, round them up to fewer sizes "
        "(roundup_power2_divisions:8), or pad or bucket the inputs"
    ),
    "garbage_collection_threshold": (
        "Release old cached segments before the limit is reached (garbage_collection_threshold:0.8)"
    ),
    "max_split_size_mb": "As a last resort, do not split large blocks (max_split_size_mb)",
    "large_segment_size_mb": (
        "Allocate smaller segments for tensors of 1 to 10 MiB (large_segment_size_mb:12)"
    ),
    "early_tensors": "Create long-lived tensors (the model, caches) before the first step",
    "empty_cache": "Release the cache where the run changes phase: torch.cuda.empty_cache()",
    "one_stream": (
        "Allocate large tensors on one stream, and call tensor.record_stream(stream) where another "
        "stream uses them"
    ),
    "shared_pool": "Let CUDA graphs share one pool, and delete graphs and MemPools not used",
    "pool_on_oom": (
        "Let other allocations use the memory of a MemPool when memory runs out (use_on_oom=True)"
    ),
    "more_free": "Leave more memory free, for example with a smaller batch",
    "raised_limit": "Raise the memory fraction, which limits the process",
    "driver_limit": (
        "Try again: another process may have freed memory just then. If it happens again, turn "
        "expandable segments off, as the driver limits mappings (WSL, some virtual machines), pin "
        "less memory, and look for a limit on locked or virtual memory (ulimit -l, ulimit -v)"
    ),
    "page_cache": (
        "Give the GPU the memory that the page cache of the host holds: read large files with "
        "O_DIRECT, or drop the cache before (sync; echo 3 > /proc/sys/vm/drop_caches, as root)"
    ),
    "repeat": "Catch torch.OutOfMemoryError and repeat the call, as the block is free soon after",
    "wait": "Wait for the other stream before the large allocation, or record fewer tensors on it",
    "find_processes": (
        "Find out which processes hold the memory (nvml_process_memory_bytes): a forgotten one, a "
        "notebook, another job, or a second rank on the same device"
    ),
    "dead_processes": (
        "End the children of the dead process that still have the GPU open (fuser -v "
        "/dev/nvidia*); if there are none, wait a minute, then reset the GPU while it is idle"
    ),
    "set_device": (
        "Call torch.cuda.set_device(local_rank) before any other use of CUDA, and read checkpoints "
        "with map_location"
    ),
    "assigned_empty": (
        "Start as many ranks as the job has GPUs, look for ranks that have died, or end the job"
    ),
    "other_gpu": "Move this run to a free device, or check that each rank selects its own device",
    "shared_gpu": "If the GPU is shared on purpose, give each process a memory fraction",
    "cache_for_libraries": (
        "Release the cache before the library needs memory, such as before the first collective: "
        "call torch.cuda.empty_cache()"
    ),
    "room_for_libraries": "Keep memory free for libraries: set a memory fraction below 1",
    "last_error": "Let go of the last error: its traceback keeps local variables",
    "cycle": (
        "Break the reference cycle: use weakref.ref, or delete the reference once it is not needed"
    ),
    "stored_exceptions": "Do not store exceptions: their tracebacks keep all local variables",
    "collect": "Collect garbage every few steps: gc.collect()",
    "find_outside": (
        "Find out what took memory outside PyTorch's allocator: another process (nvidia-smi), NCCL "
        "communicators created in a loop, an inference engine"
    ),
    "fewer_communicators": (
        "Create fewer process groups, or give NCCL smaller buffers (NCCL_BUFFSIZE) and fewer "
        "channels (NCCL_MAX_NCHANNELS)"
    ),
    "suspend_communicators": (
        "Suspend NCCL communicators while they are idle: session.suspend_communicators() on all "
        "ranks"
    ),
    "shape": "Check the line that failed: a tensor of that size most likely has a wrong shape",
    "no_graphs": "If this is inference, do not record graphs: torch.no_grad()",
    "checkpoint_on_host": "Read the checkpoint into host memory: map_location='cpu'",
    "one_parameter": (
        "Let the optimizer update one parameter after the other (foreach=False), or all in a fused "
        "kernel (fused=True)"
    ),
    "smaller_batch": (
        "Use a smaller batch or shorter sequences, and accumulate gradients over several batches"
    ),
    "recompute": (
        "Recompute activations in the backward pass instead of storing them "
        "(activation checkpointing)"
    ),
    "activations_in_16_bits": "Store activations in 16 bits, unless they are already",
    "smaller_calls": (
        "Use smaller batches or shorter sequences there, and do not keep outputs on the GPU"
    ),
    "compute_in_16_bits": "Compute in 16 bits, unless that is so already",
    "shard": (
        "Shard parameters, gradients and optimizer state over several GPUs (FSDP, ZeRO), or keep "
        "the optimizer state in host memory or in 8 bits"
    ),
    "shard_if_large": (
        "If parameters, gradients and optimizer state hold the memory, shard them (FSDP, ZeRO), or "
        "keep the optimizer state in host memory or in 8 bits"
    ),
    "fewer_bits": "Load the parameters in fewer bits, or spread the model over several GPUs",
    "find_others": (
        "Find out what the tensors are that belong neither to the model nor to this step, such as "
        "a loaded checkpoint, a dataset or a second model, and free them"
    ),
    "host_inputs": (
        "Keep in host memory what this step does not need, such as a dataset or a loaded checkpoint"
    ),
    "kept_outputs": (
        "Find what keeps tensors and their graphs: a list of outputs (append "
        "output.detach().cpu()), a sum of losses (use loss.item()), a hook"
    ),
    "find_kept": (
        "Find what keeps tensors from step to step: a sum of losses (use loss.item()), a list of "
        "outputs, a cache without a bound"
    ),
    "find_kept_outputs": (
        "Find what keeps tensors from step to step: a list of outputs, a cache without a bound"
    ),
    "optimizer_grows": (
        "Find out why the optimizer state grows: parameters or optimizers that are added in a loop"
    ),
    "parameters_grow": "Find out why the parameters grow: modules that are created in a loop",
    "bounded_step": (
        "Bound what one step can need: truncate or split the longest sequences or batches"
    ),
    "find_larger_steps": (
        "Find out why steps need more and more: batches or sequences that get longer"
    ),
    "host_tensors": ("Move what appeared then to host memory, or create it before the first step"),
    "copy_to_host": "Copy to host memory, one tensor after the other, instead of to the GPU",
    "phase_without_graphs": (
        "If gradients are not needed there, do not record graphs (torch.no_grad()), and do not "
        "keep outputs on the GPU"
    ),
    "kv_cache": "Leave more memory for activations: a smaller KV cache (--kv-cache-memory)",
    "fewer_requests": (
        "Run smaller batches: fewer requests at a time, and fewer tokens of long prompts"
    ),
    "fewer_graphs": "Capture fewer CUDA graphs, or none",
    "fewer_adapters": "Keep fewer or smaller LoRA adapters on the GPU",
    "before_wake_up": (
        "Return memory to the driver before wake_up: a trainer calls session.release() or empties "
        "its cache"
    ),
    "weights_first": "Wake the weights first, and the KV cache only when the weights are updated",
    "smaller_engine": "Give the engine less of the GPU (--gpu-memory-utilization)",
    "host_memory": (
        "Use fewer data loader workers and less pinned memory, or request more host memory"
    ),
    "signal": "Find out who sent SIGKILL: the scheduler's log, or a limit of the node",
}
"""`host_memory` and `signal` are about what killed a process without an error."""
