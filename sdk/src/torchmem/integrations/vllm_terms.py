"""What the names mean under which vLLM allocates, apart from its worker, which imports vLLM."""

from __future__ import annotations

from torchmem.sdk import EngineTerms

# LoRA adapters are allocated with the weights. Only the `DEFERRABLE_TAGS` of vLLM 0.33 stay asleep
# when a wake-up names other tags.
VLLM = EngineTerms(
    within={"lora": "weights"},
    deferrable=("weights", "kv_cache"),
    planned=("weights", "lora", "kv_cache", "cudagraph"),
)
