"""Object collectives of a lone rank: each behaves as though every rank had sent what this one did."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torchmem.preflight.child.stopping import stop


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
        print(f"torchmem: {name} brings this rank nothing, as it runs alone; rank 0 has the objects.", file=sys.stderr)
