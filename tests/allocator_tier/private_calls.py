"""Call every private function of PyTorch that the SDK calls, often, and count references.

Prints a JSON object: for each function, null if this PyTorch lacks it, or by how much 1,000 calls
changed the references to None, True, False and arguments; a few may come and go. Needs CUDA.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from torchmem.sdk.pytorch.private_calls import PRIVATE_CALLS
from torchmem.sdk.pytorch.snapshot_call import SnapshotCall

Call = Callable[..., Any]

CALLS = 1_000
MIN_CHANGE = CALLS // 10


class Number(int):
    """A number that only this script refers to."""


ZERO = Number(0)
tensor = torch.zeros(1, device="cuda")
storage = tensor.untyped_storage()
weak = storage._weak_ref()
dynamo = torch._C._dynamo.eval_frame


def function() -> None:
    """Be what Dynamo is told to skip."""


def find(name: str) -> Call | None:
    """Return the function with this name, or None."""
    try:
        found: Call = attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return None
    return found


def snapshot(call: Call) -> Call:
    """Return a call as the SDK makes it."""
    if "include_traces" in torch.cuda.memory_snapshot.__code__.co_varnames:
        return SnapshotCall(call, traces=False)
    has_pool = "mempool_id" in torch.cuda.memory_snapshot.__code__.co_varnames
    return (lambda: call(None)) if has_pool else call


def strategy(call: Call) -> Call:
    """Return a call that hides a function from Dynamo."""
    skip = dynamo._FrameAction.SKIP
    return lambda: call(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def entered(context: Call) -> Call:
    """Return a call that enters and leaves."""

    def enter() -> None:
        with context():
            pass

    return enter


def plain(call: Call) -> Call:
    """Return the function itself."""
    return call


def with_device(call: Call) -> Call:
    """Return a call with a number of this script for device 0."""
    return lambda: call(ZERO)


def weak_reference(_: Call) -> Call:
    """Return a call that takes a weak reference to the storage and gives it back."""
    return lambda: torch.UntypedStorage._free_weak_ref(storage._weak_ref())


EXAMPLES: dict[str, Callable[[Call], Call] | None] = {
    "torch._C._cuda_memorySnapshot": snapshot,
    "torch.cuda.memory._snapshot": plain,
    "torch.cuda.memory._record_memory_history": lambda call: lambda: call(enabled=None),
    "torch._C._cuda_isHistoryEnabled": plain,
    "torch._C._cuda_attach_out_of_memory_observer": None,  # each one stays attached
    "torch._C._cuda_hasPrimaryContext": with_device,
    "torch._C._cuda_getCurrentRawStream": with_device,
    "torch._C._cuda_cudaCachingAllocator_is_enabled": plain,
    "torch._C._cuda_hostMemoryStats": plain,
    "torch._C._current_graph_task_id": plain,
    "torch._C._current_autograd_node": plain,
    "torch.UntypedStorage._weak_ref": weak_reference,
    "torch.UntypedStorage._new_with_weak_ptr": lambda call: lambda: call(weak),
    "torch.UntypedStorage._free_weak_ref": weak_reference,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": strategy,
    "torch._C._dynamo.eval_frame.skip_code": lambda call: lambda: call(function.__code__),
    "torch._C._dynamo.eval_frame.set_eval_frame": lambda call: lambda: call(call(None)),
    "torch._C.DisableTorchFunction": entered,
    # These need process groups, see test_communicators.py.
    "torch.distributed.distributed_c10d._world": None,
    "torch.distributed.ProcessGroup._get_backend": None,
    "torch.distributed.ProcessGroupNCCL._is_initialized": None,
    "torch.distributed.ProcessGroupNCCL._get_sequence_number_for_group": None,
    "torch.cuda._lazy_call": lambda call: lambda: call(function),
    "torch.cuda._raw_device_uuid_nvml": plain,
    "torch.cuda._get_nvml_device_index": lambda call: lambda: call(0),
    "torch.cuda._utils._get_device_index": lambda call: lambda: call(ZERO, optional=True),
}


def changed(call: Call) -> dict[str, int]:
    """Return by how much 1,000 calls change reference counts."""
    for _ in range(3):
        call()  # what is measured, cached or imported at the first call
    watched: dict[str, object] = {
        "None": None,
        "True": True,
        "False": False,
        "argument": ZERO,
        "code": function,
    }
    before = {name: sys.getrefcount(value) for name, value in watched.items()}
    for _ in range(CALLS):
        call()
    now = {name: sys.getrefcount(value) for name, value in watched.items()}
    changes = {name: now[name] - before[name] for name in now}
    return {name: change for name, change in changes.items() if abs(change) >= MIN_CHANGE}


for value in (ZERO, None, True, False):
    for _ in range(10 * CALLS):  # so that a defect shows as a number, not as a crash
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
results = {}
for private in PRIVATE_CALLS:
    call, example = find(private.name), EXAMPLES[private.name]
    known: dict[str, int] | None = None if call is None else {}
    results[private.name] = changed(example(call)) if call and example else known
print(json.dumps(results))
