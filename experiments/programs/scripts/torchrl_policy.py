"""Train a policy of TorchRL on made-up transitions."""

import torch
from tensordict import TensorDict
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

network = torch.nn.Linear(4, 2).cuda()
actor = QValueActor(network, in_keys=["observation"], action_space="one-hot")
loss = DQNLoss(actor, action_space="one-hot", delay_value=False)
loss.make_value_estimator(gamma=0.9)
optimizer = torch.optim.Adam(loss.parameters())
for _ in range(6):
    data = TensorDict(
        {
            "observation": torch.randn(8, 4),
            "action": torch.nn.functional.one_hot(torch.randint(2, (8,)), 2),
            "next": {
                "observation": torch.randn(8, 4),
                "reward": torch.randn(8, 1),
                "done": torch.zeros(8, 1, dtype=torch.bool),
                "terminated": torch.zeros(8, 1, dtype=torch.bool),
            },
        },
        batch_size=[8],
    ).to("cuda")
    loss(data)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 6)
