"""Makes torch.distributed treat this process as one rank of many, although it runs alone.

GPU tensors use PyTorch's own ProcessGroupNCCL on top of the phantom GPU's NCCL: streams, buffers
and groups are real, and nothing is sent. CPU tensors use PyTorch's fake process group. No port is
opened and nothing waits for other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchmem.preflight.child.exit import stop
from torchmem.preflight.plan import Placement

ID_BYTES = 128
"""Size of an ncclUniqueId (nccl.h), which rank 0 puts into the store for the others."""


def lone_rank(placement: Placement) -> None:
    """Run as rank `placement.rank` of `placement.world_size` in all process groups from now on.

    Call it after `import torch` and before the script uses torch.distributed. Ends the process with
    exit code 2 if this version of PyTorch does not support it.
    """
    if not dist.is_available():
        stop(
            "this build of PyTorch has no torch.distributed: install one that does, or omit "
            "--world-size."
        )
    _use_fake_group_for_gloo()
    _wait_before_buckets_are_rebuilt()
    # The monitoring thread would look for other ranks' errors in the store.
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # DETAIL compares every collective with those of the other ranks.
        dist.set_debug_level(dist.DebugLevel.INFO)
    replacements: dict[str, Callable[..., object]] = {
        "init_process_group": _init_process_group(placement),
        "monitored_barrier": _monitored_barrier,
        **ObjectCollectives(dist).by_name(),
    }
    for name, replacement in replacements.items():
        _replace(getattr(distributed_c10d, name, None), replacement)
    for name in ("TCPStore", "FileStore"):
        _replace(getattr(dist, name, None), functools.partial(_new_store, placement.world_size))
    _replace(torch.multiprocessing.spawn, _spawn(placement, torch.multiprocessing.spawn))


class ObjectCollectives:
    """The functions of torch.distributed that send Python objects, as if all ranks sent the same.

    The originals (torch/distributed/distributed_c10d.py, PyTorch 2.13) send pickled bytes through
    the GPU and read their sizes back, which are zero on a phantom GPU.
    """

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._has_warned = False

    def by_name(self) -> dict[str, Callable[..., object]]:
        """Return the functions by the name of the one that they replace."""
        return {
            "all_gather_object": self.all_gather_object,
            "gather_object": self.gather_object,
            "broadcast_object_list": self.broadcast_object_list,
            "scatter_object_list": self.scatter_object_list,
            "send_object_list": self.send_object_list,
            "recv_object_list": self.recv_object_list,
        }

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill the list with copies of this rank's object."""
        sent = pickle.dumps(obj)
        for rank in range(self._dist.get_world_size(group)):
            object_list[rank] = pickle.loads(sent)  # noqa: S301 - pickled above

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        """Fill the list with copies of this rank's object if this is the destination rank."""
        if self._is_this_rank(dst, group, group_dst) and object_gather_list is not None:
            self.all_gather_object(object_gather_list, obj, group)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,  # noqa: ARG002
        group_src: int | None = None,
    ) -> None:
        """Leave the list unchanged. Warns once if another rank would have filled an empty list."""
        if not self._is_this_rank(src, group, group_src):
            self._warn_if_empty("broadcast_object_list", object_list)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,  # noqa: ARG002
        group: Any = None,
        group_src: int | None = None,  # noqa: ARG002
    ) -> None:
        """Return this rank's entry of its own list. Warns once if this rank has no list."""
        if scatter_object_input_list:
            sent = pickle.dumps(scatter_object_input_list[self._dist.get_rank(group)])
            scatter_object_output_list[0] = pickle.loads(sent)  # noqa: S301 - pickled above
        else:
            self._warn_if_empty("scatter_object_list", scatter_object_output_list)

    def send_object_list(self, *_: object, **__: object) -> None:
        """Do nothing: there is no receiver."""

    def recv_object_list(self, *_: object, **__: object) -> NoReturn:
        """End the script: what another rank would send is unknown."""
        stop(
            "the script receives objects from another rank, but a preflight runs one rank alone: "
            "compute them on every rank (torch.distributed.pipelining: pass input_args and "
            "output_args to PipelineStage)."
        )

    def _is_this_rank(self, rank: int | None, group: Any, group_rank: int | None) -> bool:
        if group_rank is not None:
            return bool(self._dist.get_rank(group) == group_rank)
        return bool(self._dist.get_rank() == (rank or 0))

    def _warn_if_empty(self, name: str, objects: list[Any]) -> None:
        if self._has_warned or any(value is not None for value in objects):
            return
        self._has_warned = True
        print(
            f"torchmem: {name} returns nothing on this rank because it runs alone; the objects are "
            "on rank 0.",
            file=sys.stderr,
        )


class LoneStore(dist.Store):  # type: ignore[misc]  # torch is followed as Any
    """A key-value store that answers at once, as if every rank had done what this one did.

    A key that was never set reads as zeros, as many as ProcessGroupNCCL expects of an id.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(minutes=5)

    @property
    def timeout(self) -> timedelta:
        """The timeout, which has no effect."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, which has no effect."""
        self._timeout = timeout

    def clone(self) -> LoneStore:
        """Return this store."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        """Return the value of a key, zeros if it was never set."""
        return self._values.get(key, bytes(ID_BYTES))

    def add(self, key: str, value: int) -> int:
        """Add `value` once per rank and return the sum."""
        total = int(self._values.get(key, b"0")) + value * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the key if it has the expected value or none, and return its value."""
        if self._values.get(key, expected.encode()) == expected.encode():
            self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys were set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)


_stores: list[LoneStore] = []
"""Keeps stores alive: C++ holds a store but not its Python object, which answers the calls."""


def _new_store(world_size: int, *_: object, **__: object) -> LoneStore:
    _stores.append(LoneStore(world_size))
    return _stores[-1]


def _init_process_group(placement: Placement) -> Callable[..., None]:
    """Return `init_process_group` without rendezvous, with rank and size of the placement."""
    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        call = signature.bind(*arguments, **keywords).arguments
        call |= {"rank": placement.rank, "world_size": placement.world_size}
        call |= {"init_method": None, "store": _new_store(placement.world_size)}
        original(**call)
        _let_stages_decide_alone(sys.modules.get("torch.distributed.pipelining.stage"))

    return init_process_group


def _let_stages_decide_alone(stages: ModuleType | None) -> None:
    """Let a pipeline stage decide without its neighbors whether the script gave its shapes.

    stages: `torch.distributed.pipelining.stage`, None if the script has not imported it. Replaces
    `PipelineStage._warmup_forward_vote` and `_warmup_backward_result` of PyTorch 2.13; older
    versions do not ask the neighbors.
    """
    stage = getattr(stages, "PipelineStage", None)
    if stages is None or not hasattr(stage, "_warmup_forward_vote"):
        return
    torch, mode = stages.torch, stages.InferenceMode

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        is_dynamic = mode.needs_dynamic(self._user_meta, has_backward)
        self._own_vote = torch.tensor([0 if is_dynamic else 1])
        return self._own_vote if received_acc is None else self._own_vote * received_acc

    def result(self: Any, received_result: Any = None) -> Any:
        return self._own_vote if received_result is None else received_result

    setattr(stage, "_warmup_forward_vote", vote)  # noqa: B010 - mypy does not know the type
    setattr(stage, "_warmup_backward_result", result)  # noqa: B010


def _use_fake_group_for_gloo() -> None:
    """Create the fake process group where Gloo, which would connect to other ranks, is requested.

    The group keeps the name "gloo". Uses `BackendConfig.get_device_backend_map` and
    `Backend.backend_type_map` (torch/distributed/distributed_c10d.py).
    """
    try:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

        original = distributed_c10d.BackendConfig.get_device_backend_map
        types = distributed_c10d.Backend.backend_type_map
    except (ImportError, AttributeError):
        stop(f"PyTorch {torch.__version__} has no fake process group: use PyTorch 2.4 or newer.")

    def get_device_backend_map(config: Any) -> dict[str, str]:
        names = original(config)
        return {device: "fake" if name == "gloo" else name for device, name in names.items()}

    distributed_c10d.BackendConfig.get_device_backend_map = get_device_backend_map
    # The backend with this name is not a ProcessGroupGloo.
    types["gloo"] = dist.ProcessGroup.BackendType.CUSTOM


def _wait_before_buckets_are_rebuilt() -> None:
    """Make DistributedDataParallel free its first buckets at the same point in every run.

    It makes new buckets after the first backward pass. The old ones live until the watchdog of
    ProcessGroupNCCL, which polls ten times per second, has seen that their all-reduce is done. On a
    phantom GPU the second forward pass may begin before that.
    """
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    original = getattr(parallel, "_pre_forward", None)
    if original is None:
        return

    @functools.wraps(original)
    def pre_forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _will_rebuild_buckets(self) and _is_nccl(self.process_group):
            # PyTorch 2.4 asks the group's first backend, which may be a fake one.
            with contextlib.suppress(RuntimeError):
                self.process_group._wait_for_pending_works()  # noqa: SLF001
        return original(self, *arguments, **keywords)

    parallel._pre_forward = pre_forward  # noqa: SLF001


def _will_rebuild_buckets(parallel: Any) -> bool:
    rebuilds = parallel.static_graph or not parallel.find_unused_parameters
    return rebuilds and not parallel._get_ddp_logging_data().get("has_rebuilt_buckets")  # noqa: SLF001


def _is_nccl(group: Any) -> bool:
    backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


def _monitored_barrier(group: Any = None, *_: object, **__: object) -> None:
    """Return at once."""
    if dist.get_backend(group) != "gloo":
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")


def _spawn(placement: Placement, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.multiprocessing.spawn` that only runs this rank's function, in this process."""

    @functools.wraps(original)
    def spawn(
        fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1, **keywords: Any
    ) -> Any:
        if nprocs not in (placement.local_world_size, placement.world_size):
            return original(fn, args, nprocs, **keywords)
        fn(placement.rank if nprocs == placement.world_size else placement.local_rank, *args)
        return None

    return spawn


def _replace(original: object, replacement: object) -> None:
    """Replace a function in all modules of torch, which import names from each other."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and original is not None:
            names = [key for key, value in list(vars(module).items()) if value is original]
            for key in names:
                setattr(module, key, replacement)
