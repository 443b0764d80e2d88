"""Train a graph network of PyTorch Geometric."""

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

edges = torch.randint(50, (2, 200))
data = Data(x=torch.randn(50, 16), edge_index=edges, y=torch.randint(4, (50,))).to("cuda")
model = GCN(16, 32, num_layers=2, out_channels=4).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(7):
    torch.nn.functional.cross_entropy(model(data.x, data.edge_index), data.y).backward()
    optimizer.step()
    optimizer.zero_grad()
print("true steps", 7)
