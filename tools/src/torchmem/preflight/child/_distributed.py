"""Object collectives of a lone rank: each behaves as though every rank had sent what this one did.

Stages of torch.distributed.pipelining on a lone rank: shapes given by the script need no other rank's consent.

The child's second door to torch: it makes torch.distributed believe that this process is one rank of many.

GPU tensors go through PyTorch's own ProcessGroupNCCL, whose NCCL is the phantom GPU's: streams, buffers and groups are
real, nothing is sent. CPU tensors go through PyTorch's fake process group. No port is opened and nobody waits.
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

from torchmem.preflight.child.ending import stop
from torchmem.preflight.plan import Placement


class ObjectCollectives:
    """The functions of torch.distributed (torch/distributed/distributed_c10d.py, 2.13) that carry Python objects.

    The real ones send pickled bytes through the GPU and read their sizes back, which are zero on the phantom GPU.
    """

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._has_told = False

    def by_name(self) -> dict[str, Callable[..., object]]:
        """The functions by the name that they replace."""
        return {
            "all_gather_object": self.all_gather_object,
            "gather_object": self.gather_object,
            "broadcast_object_list": self.broadcast_object_list,
            "scatter_object_list": self.scatter_object_list,
            "send_object_list": self.send_object_list,
            "recv_object_list": self.recv_object_list,
        }

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Every place of the list gets a copy."""
        sent = pickle.dumps(obj)
        for rank in range(self._dist.get_world_size(group)):
            object_list[rank] = pickle.loads(sent)  # noqa: S301  (our own bytes)

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        """On the receiving rank, every place of the list gets a copy."""
        if self._is_this_rank(dst, group, group_dst) and object_gather_list is not None:
            self.all_gather_object(object_gather_list, obj, group)

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,  # noqa: ARG002
        group_src: int | None = None,
    ) -> None:  # fmt: skip
        """The list stays as it is. A rank that had nothing to send is told once."""
        if not self._is_this_rank(src, group, group_src):
            self._tell_if_empty("broadcast_object_list", object_list)

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
        src: int | None = None, group: Any = None, group_src: int | None = None,  # noqa: ARG002
    ) -> None:  # fmt: skip
        """This rank's object of its own list. A rank that has no list is told once."""
        if scatter_object_input_list:
            sent = scatter_object_input_list[self._dist.get_rank(group)]
            scatter_object_output_list[0] = pickle.loads(pickle.dumps(sent))  # noqa: S301  (our own bytes)
        else:
            self._tell_if_empty("scatter_object_list", scatter_object_output_list)

    def send_object_list(self, *_: object, **__: object) -> None:
        """Nobody receives it."""

    def recv_object_list(self, *_: object, **__: object) -> NoReturn:
        """What another rank would send is not known here, so the script cannot go on."""
        stop(
            "the script receives objects from another rank, and a preflight runs one rank alone: have it compute them "
            "on every rank (torch.distributed.pipelining: pass input_args and output_args to PipelineStage)."
        )

    def _is_this_rank(self, rank: int | None, group: Any, group_rank: int | None) -> bool:
        if group_rank is not None:
            return bool(self._dist.get_rank(group) == group_rank)
        return bool(self._dist.get_rank() == (rank or 0))

    def _tell_if_empty(self, name: str, objects: list[Any]) -> None:
        if self._has_told or any(value is not None for value in objects):
            return
        self._has_told = True
        print(
            f"torchmem: {name} brings this rank nothing, as it runs alone; rank 0 has the objects.",
            file=sys.stderr,
        )


def decide_alone(stages: ModuleType | None) -> None:
    """Let a stage decide by itself that its shapes were given, where it would ask its neighbours.

    stages: `torch.distributed.pipelining.stage`, None when the script has not imported it. By
    `PipelineStage._warmup_forward_vote` and `_warmup_backward_result`, which 2.13 has; older ones do not ask.
    """
    stage = getattr(stages, "PipelineStage", None)
    if stages is None or not hasattr(stage, "_warmup_forward_vote"):
        return
    torch, mode = stages.torch, stages.InferenceMode

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        self._own_vote = torch.tensor(
            [0 if mode.needs_dynamic(self._user_meta, has_backward) else 1]
        )
        return self._own_vote if received_acc is None else self._own_vote * received_acc

    def result(self: Any, received_result: Any = None) -> Any:
        return self._own_vote if received_result is None else received_result

    setattr(stage, "_warmup_forward_vote", vote)  # noqa: B010  (mypy: stage is of no known type)
    setattr(stage, "_warmup_backward_result", result)  # noqa: B010


ID_BYTES = 128
"""Of an ncclUniqueId (nccl.h), which rank 0 leaves in the store for the others."""


def lone_rank(placement: Placement) -> None:
    """Be rank `placement.rank` of `placement.world_size` in every process group from now on.

    To be called when `import torch` is over and before the script uses torch.distributed. Ends the process with one
    sentence and exit code 2 when this torch cannot.
    """
    if not dist.is_available():
        stop(
            "this torch has no torch.distributed: install a build of it with distributed, or leave out --world-size."
        )
    _replace_gloo()
    _settle_before_buckets_are_rebuilt()
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = (
        "0"  # its thread looks for other ranks' errors in the store
    )
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(
            dist.DebugLevel.INFO
        )  # DETAIL compares every collective with the other ranks'
    objects = ObjectCollectives(dist)
    replacements: dict[str, Callable[..., object]] = {
        "init_process_group": _init_process_group(placement),
        "monitored_barrier": _monitored_barrier,
        **objects.by_name(),
    }
    for name, replacement in replacements.items():
        _replace(getattr(distributed_c10d, name, None), replacement)
    for name in ("TCPStore", "FileStore"):
        _replace(getattr(dist, name, None), functools.partial(_lone_store, placement.world_size))
    _replace(torch.multiprocessing.spawn, _spawn(placement, torch.multiprocessing.spawn))


class LoneStore(dist.Store):  # type: ignore[misc]  # torch is followed as Any
    """A key-value store that answers at once, as though every rank had done what this one did.

    A key that nobody has set reads as zeros, as many as ProcessGroupNCCL wants of an id.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(minutes=5)

    @property
    def timeout(self) -> timedelta:
        """What was set; nothing here takes any time."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> LoneStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(ID_BYTES))

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, expected.encode()) == expected.encode():
            self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Everybody is there already."""

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


_alive: list[LoneStore] = []
"""C++ keeps a store alive without its Python half, which answers the calls."""


def _lone_store(world_size: int, *_: object, **__: object) -> LoneStore:
    _alive.append(LoneStore(world_size))
    return _alive[-1]


def _init_process_group(placement: Placement) -> Callable[..., None]:
    """`init_process_group` without a rendezvous; rank and size of the script's own call give way to the placement."""
    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        call = signature.bind(*arguments, **keywords).arguments
        call |= {"rank": placement.rank, "world_size": placement.world_size}
        call |= {"init_method": None, "store": _lone_store(placement.world_size)}
        original(**call)
        decide_alone(sys.modules.get("torch.distributed.pipelining.stage"))

    return init_process_group


def _replace_gloo() -> None:
    """Put the fake process group where Gloo is asked for, which would look for the others; the group keeps that name.

    By `BackendConfig.get_device_backend_map` and `Backend.backend_type_map` (torch/distributed/distributed_c10d.py).
    """
    try:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

        asked_for = distributed_c10d.BackendConfig.get_device_backend_map
        types = distributed_c10d.Backend.backend_type_map
    except (ImportError, AttributeError):
        stop(f"torch {torch.__version__} has no fake process group: take torch 2.4 or newer.")

    def get_device_backend_map(config: Any) -> dict[str, str]:
        return {
            device: "fake" if name == "gloo" else name for device, name in asked_for(config).items()
        }

    distributed_c10d.BackendConfig.get_device_backend_map = get_device_backend_map
    types["gloo"] = dist.ProcessGroup.BackendType.CUSTOM


def _settle_before_buckets_are_rebuilt() -> None:
    """Have DistributedDataParallel give up its first buckets in time, at every run alike.

    After the first backward it makes new buckets. The old ones live until ProcessGroupNCCL's watchdog, which looks ten
    times a second, has seen that their all-reduce is over; here the second forward may come before that.
    """
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    before_forward = getattr(parallel, "_pre_forward", None)
    if before_forward is None:
        return

    @functools.wraps(before_forward)
    def settled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        will_rebuild = self.static_graph or not self.find_unused_parameters
        if (
            will_rebuild
            and not self._get_ddp_logging_data().get("has_rebuilt_buckets")
            and _is_nccl(self.process_group)
        ):
            with contextlib.suppress(
                RuntimeError
            ):  # torch 2.4 asks the group's first backend, also a fake one
                self.process_group._wait_for_pending_works()  # noqa: SLF001
        return before_forward(self, *arguments, **keywords)

    parallel._pre_forward = settled  # noqa: SLF001


def _is_nccl(group: Any) -> bool:
    backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


def _monitored_barrier(group: Any = None, *_: object, **__: object) -> None:
    """Everybody is there already."""
    if dist.get_backend(group) != "gloo":
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")


def _spawn(placement: Placement, original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.multiprocessing.spawn`: of the processes of a node, this one's is run, here."""

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
    """Wherever torch's modules, which have imported names from each other, hold the original."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and original is not None:
            held = [key for key, value in list(vars(module).items()) if value is original]
            for key in held:
                setattr(module, key, replacement)
