"""Train a small GPT of Megatron core, without Transformer Engine."""

import os

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=1, hidden_size=64, num_attention_heads=2, use_cpu_initialization=True
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=128,
    max_sequence_length=32,
).cuda()
optimizer = torch.optim.Adam(model.parameters())
positions = torch.arange(16).cuda()[None]
mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).cuda()
for _ in range(4):
    tokens = torch.randint(128, (1, 16)).cuda()
    model(tokens, positions, mask, labels=tokens).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 4)
torch.distributed.destroy_process_group()
