"""Train and dump the memory history that the script itself records, in each of its modes."""

import itertools
import pickle
from pathlib import Path

import torch
from training import train

record = torch.cuda.memory._record_memory_history


def recorded(mode):
    """Train while the history is recorded, and return the steps and what the dump contains."""
    steps = train()
    torch.cuda.memory._dump_snapshot("own.pickle")
    record(enabled=None)
    found = pickle.loads(Path("own.pickle").read_bytes())
    trace = found["device_traces"][0]
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    print(
        *mode,
        "entries" if trace else "no entries",
        "stacks" if any(entry.get("frames") for entry in trace) else "no stacks",
        "block stacks" if any(block.get("frames") for block in blocks) else "no block stacks",
        len(trace) <= 1000,
    )
    return steps


steps = 0
contexts = (None, "state", "alloc", "all")
for mode in itertools.product(("state", "all"), contexts, ("python", "all")):
    enabled, context, stacks = mode
    record(enabled, context=context, stacks=stacks, max_entries=1000)
    steps += recorded(mode)
record(True, trace_alloc_max_entries=1000, trace_alloc_record_context=True)
steps += recorded(("legacy",))
print("true steps", steps)
