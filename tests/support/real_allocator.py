"""PyTorch's allocator on the phantom GPU, driven by `support.allocator_programs`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from support.allocator_programs import Operation, Outcome, Setting

PHANTOM = ctypes.CDLL(None)
FIBONACCI = 11400714819323198485


def hash_order(stream: Any) -> int:
    """Return a stream's place in PyTorch's flat hash maps (ska::fibonacci_hash_policy)."""
    bits = 1 << 56 | stream.stream_id
    return int(bits * FIBONACCI % 2**64)


class Real:
    """PyTorch's allocator on device 0, with streams numbered in the order of its hash maps."""

    def __init__(self, setting: Setting) -> None:
        torch.cuda.init()
        if setting.fraction < 1:
            torch.cuda.set_per_process_memory_fraction(setting.fraction)
        streams = [
            torch.cuda.default_stream(),
            *(torch.cuda.Stream() for _ in range(setting.streams - 1)),
        ]
        self.streams = sorted(streams, key=hash_order)
        self.numbers = {stream.cuda_stream: number for number, stream in enumerate(self.streams)}
        self.tensors: dict[int, Any] = {}
        self.pools: dict[int, Any] = {}
        PHANTOM.phantom_newest_range.restype = ctypes.c_uint64

    def run(self, operation: Operation) -> Outcome:
        """Run one operation."""
        name, *numbers = operation
        result: Outcome = getattr(self, f"_{name}")(*numbers)
        return result

    def stats(self) -> dict[str, Any]:
        """Return all statistics."""
        nested: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(0)
        return nested

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all segments, with streams by number and without stack frames."""
        return [
            self._plain(segment) for segment in torch.cuda.memory_snapshot(include_traces=False)
        ]

    def driver(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU."""
        free, total = torch.cuda.mem_get_info(0)
        return free, total

    def newest_range(self) -> int:
        """Return the address of the range that the driver allocated last."""
        return int(PHANTOM.phantom_newest_range())

    def _plain(self, segment: dict[str, Any]) -> dict[str, Any]:
        blocks = [
            {key: value for key, value in block.items() if key != "frames"}
            for block in segment["blocks"]
        ]
        plain = {key: value for key, value in segment.items() if key != "frames"}
        return plain | {"blocks": blocks, "stream": self.numbers[segment["stream"]]}

    def _malloc(self, slot: int, size: int, stream: int) -> Outcome:
        torch.cuda.set_stream(self.streams[stream])
        try:
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            return str(error)
        self.tensors[slot] = tensor
        return int(tensor.data_ptr())

    def _free(self, slot: int) -> None:
        del self.tensors[slot]

    def _record_stream(self, slot: int, stream: int) -> None:
        self.tensors[slot].record_stream(self.streams[stream])

    def _hold_events(self, hold: int) -> None:
        PHANTOM.phantom_hold_events(hold)

    def _empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def _reset_accumulated(self) -> None:
        torch.cuda.reset_accumulated_memory_stats()

    def _make_pool(self, pool: int, use_on_oom: int, no_split: int) -> None:
        made = self.pools[pool] = torch.cuda.MemPool(
            use_on_oom=bool(use_on_oom), no_split=bool(no_split)
        )
        assert made.id == (0, pool)

    def _begin_pool(self, pool: int) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, (0, pool))

    def _end_pool(self, pool: int) -> None:
        torch._C._cuda_endAllocateToPool(0, (0, pool))
        torch._C._cuda_releasePool(0, (0, pool))

    def _drop_pool(self, pool: int) -> None:
        del self.pools[pool]
