"""Memory snapshots for tests: built by hand, drawn by hypothesis, or loaded from a file."""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import SegmentInfo

RECORDED = Path(__file__).parent / "real_gpus"
REAL_GPUS = ("small", "forward_bf16_128", "forward_fp32_128", "training_256")


def of_real_gpu(name: str, folder: Path) -> Path:
    """Write the snapshot of this name, which was recorded on a real GPU, into the folder."""
    path = folder / f"{name}.pickle"
    path.write_bytes(lzma.decompress((RECORDED / f"{name}.pickle.xz").read_bytes()))
    return path


def segment(address: int, kind: str, blocks: list[tuple[int, str]], **fields: Any) -> SegmentInfo:
    """Return a segment as PyTorch reports it, from the (size, state) of its blocks."""
    placed, position = [], address
    for size, state in blocks:
        placed.append({"address": position, "size": size, "requested_size": size, "state": state})
        position += size
    active = sum(size for size, state in blocks if state != "inactive")
    info: dict[str, Any] = {
        "device": 0,
        "address": address,
        "total_size": position - address,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": placed,
    }
    return info | fields  # type: ignore[return-value]


@st.composite
def segments(draw: st.DrawFn) -> list[SegmentInfo]:
    """Draw a plausible snapshot: no adjacent free blocks, and sizes that are multiples of 512."""
    result, address = [], 1 << 40
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["small", "large"]))
        sizes = draw(
            st.lists(st.integers(1, 2048 if kind == "small" else 80_000), min_size=1, max_size=8)
        )
        first_free = draw(st.booleans())
        used = draw(st.sampled_from(["active_allocated", "active_pending_free"]))
        blocks = [
            (size * 512, "inactive" if (index % 2 == 0) == first_free else used)
            for index, size in enumerate(sizes)
        ]
        expandable = draw(st.booleans())
        if expandable:
            page = (2 if kind == "small" else 20) * MIB
            missing = -sum(size for size, _ in blocks) % page
            blocks = [*blocks[:-1], (blocks[-1][0] + missing, blocks[-1][1])]
        pool = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 1)]))
        stream = draw(st.sampled_from([0, 0, 7]))
        result.append(
            segment(
                address, kind, blocks, stream=stream, segment_pool_id=pool, is_expandable=expandable
            )
        )
        address += 1 << 36
    return result


class _BuiltinsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Reject every class and function."""
        raise pickle.UnpicklingError(f"the snapshot refers to {module}.{name}")


def load_snapshot(path: Path) -> dict[str, Any]:
    """Load a snapshot file, which must contain only builtin types."""
    with path.open("rb") as file:
        snapshot: dict[str, Any] = _BuiltinsOnly(file).load()
    return snapshot
