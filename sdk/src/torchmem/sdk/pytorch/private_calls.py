"""The private functions of PyTorch that the SDK calls, and what each of them takes.

PyTorch may change them in any release. `make test-versions` calls all of them on each supported
version, and tests hold this table against the code and against PyTorch's reference counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrivateCall:
    """A function of torch: its name, the first version that has it, and what the call does.

    until: the last version that has it; empty if the newest one does.
    without: what is missing where PyTorch lacks it; empty if every supported version has it.
    takes: references that it takes from its arguments and keeps or loses; empty if none.
    locks: what the call waits for while it holds the GIL; empty if nothing.
    """

    name: str
    since: str
    until: str = ""
    without: str = ""
    takes: str = ""
    locks: str = ""


_MUTEX = "the allocator's mutex"

PRIVATE_CALLS = (
    PrivateCall(
        "torch._C._cuda_memorySnapshot",
        "2.0",
        takes="one from each member of its tuple, since 2.11, which the SDK gives back",
        locks=_MUTEX,
    ),
    PrivateCall("torch.cuda.memory._snapshot", "2.0", locks=_MUTEX),
    PrivateCall("torch.cuda.memory._record_memory_history", "2.0", locks=_MUTEX),
    PrivateCall("torch._C._cuda_isHistoryEnabled", "2.1"),
    PrivateCall(
        "torch._C._cuda_attach_out_of_memory_observer",
        "2.0",
        takes="one from the observer, for the life of the process",
        locks=_MUTEX,
    ),
    PrivateCall("torch._C._cuda_hasPrimaryContext", "2.0"),
    PrivateCall("torch._C._cuda_getCurrentRawStream", "2.0"),
    PrivateCall(
        "torch._C._cuda_cudaCachingAllocator_is_enabled",
        "2.12",
        without="a cache that the script has turned off is not noticed",
    ),
    PrivateCall("torch._C._cuda_hostMemoryStats", "2.7", without="pinned memory"),
    PrivateCall("torch._C._current_graph_task_id", "2.1", without="the stack in the backward pass"),
    PrivateCall("torch._C._current_autograd_node", "2.1", without="the name of the autograd node"),
    PrivateCall(
        "torch.UntypedStorage._weak_ref",
        "2.0",
        takes="a weak one to the storage, until _free_weak_ref",
    ),
    PrivateCall("torch.UntypedStorage._new_with_weak_ptr", "2.0"),
    PrivateCall("torch.UntypedStorage._free_weak_ref", "2.0"),
    PrivateCall(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "2.7",
        without="skip_code and set_eval_frame are called",
    ),
    PrivateCall("torch._C._dynamo.eval_frame.skip_code", "2.0", until="2.6"),
    PrivateCall("torch._C._dynamo.eval_frame.set_eval_frame", "2.0"),
    PrivateCall("torch._C.DisableTorchFunction", "2.0"),
    PrivateCall("torch.distributed.distributed_c10d._world", "2.0"),
    PrivateCall("torch.distributed.ProcessGroup._get_backend", "2.0"),
    PrivateCall(
        "torch.distributed.ProcessGroupNCCL._is_initialized",
        "2.4",
        without="a group's communicators count from its creation",
    ),
    PrivateCall("torch.distributed.ProcessGroupNCCL._get_sequence_number_for_group", "2.0"),
    PrivateCall("torch.cuda._lazy_call", "2.0"),
    PrivateCall("torch.cuda._raw_device_uuid_nvml", "2.0", without="see describe_device"),
    PrivateCall("torch.cuda._get_nvml_device_index", "2.0", without="see describe_device"),
    PrivateCall("torch.cuda._utils._get_device_index", "2.0"),
)
