"""A script for test_transformers.py: continuous batching of Transformers in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.request import urlopen

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from torchmem import sdk

ADDRESS, _, OUT = sys.argv[1:4]


def main() -> None:
    """Serve two batches of requests, and note what the exporter says of them."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        vocab_size=1024,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).bfloat16().cuda().eval()
    session = sdk.instrument(run="batching", interval=0.05)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):  # a phase is measured once the device has been read
        with session.request(4), torch.no_grad():
            model.generate_batch(
                [list(range(1, 17))] * 4, generation_config=settings, progress_bar=False
            )
    session.close()  # publishes the last state
    text = urlopen(f"http://{ADDRESS}/metrics").read().decode()
    Path(OUT).write_text(json.dumps({"state": "served", "text": text}) + "\n")


if __name__ == "__main__":
    main()
