"""Fit a model of Pyro by stochastic variational inference."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

pyro.enable_validation(False)


def model(data):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(1, device="cuda"), 1.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample("seen", dist.Normal(mean, 1.0), obs=data)


svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), loss=Trace_ELBO())
for _ in range(8):
    svi.step(torch.randn(32, device="cuda"))
print("true steps", 8)
