"""Train and dump the memory history that the script itself records."""

import pickle
from pathlib import Path

import torch
from training import train

torch.cuda.memory._record_memory_history(max_entries=1000)
steps = train()
torch.cuda.memory._dump_snapshot("own.pickle")
torch.cuda.memory._record_memory_history(enabled=None)
trace = pickle.loads(Path("own.pickle").read_bytes())["device_traces"][0]
print("has its own entries", 0 < len(trace) <= 1000)
print("true steps", steps)
