"""Reading what `torch.cuda.memory._dump_snapshot` wrote: untrusted files into plain values."""
