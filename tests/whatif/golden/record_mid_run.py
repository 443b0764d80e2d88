"""Keep captures of a training, and what PyTorch's allocator does under other settings, as goldens.

Run `python tests/whatif/golden/record_mid_run.py FOLDER [TORCH]` with the CUDA build of torch.
FOLDER is that of experiments.midrun.compare; runs that it lacks are made. TORCH is a folder with
another version of torch. The training has batches of varying length.
"""

from __future__ import annotations

import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.midrun.compare import counted, truth_of
from experiments.midrun.runs import ADDRESSES

from torchmem.trace.worker import load

HERE = Path(__file__).resolve().parent
NAMES = ("varying", "varying, tight")


def main() -> None:
    """Write one file for each workload."""
    torch = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    for name in NAMES[: 1 if torch else 2]:
        folder = Path(sys.argv[1]) / name.replace(", ", "-")
        truth = truth_of(folder, name, torch)
        golden: dict[str, Any] = {"switched": truth.switched, "restarted": truth.restarted}
        golden["snapshots"] = {}
        for addresses in ADDRESSES:
            place = folder / addresses.replace(":", "-")
            golden["recorded"] = counted(place, name, "record", torch, addresses=addresses)
            with (place / "snapshot.pickle").open("rb") as file:
                golden["snapshots"][addresses] = without_stacks(load(file))
        version = golden["snapshots"]["reuse"]["torchmem"]["versions"]["torch"].partition("+")[0]
        path = HERE / "mid_run" / f"{name.replace(', ', '-')}-{version}.pickle.xz"
        path.write_bytes(lzma.compress(pickle.dumps(golden, protocol=4), preset=9))


def without_stacks(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot whose events and blocks have no frames."""
    traces = [[event | {"frames": []} for event in trace] for trace in snapshot["device_traces"]]
    segments = [
        segment | {"frames": [], "blocks": [block | {"frames": []} for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    return snapshot | {"device_traces": traces, "segments": segments}


if __name__ == "__main__":
    main()
