"""Train two workers of Ray Train."""

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train():
    model = prepare_model(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(4, 8, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


ray.init(num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
    run_config=RunConfig(storage_path=f"{__import__('os').getcwd()}/ray"),
).fit()
print("true steps", 6)
print("true steps", 6)
