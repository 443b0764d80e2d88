"""A function that trains, for programs that call one in a process of their own."""


def train(steps=8):
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps
