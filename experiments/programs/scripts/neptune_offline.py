"""Train and log to Neptune, offline."""

import neptune
from training import train

run = neptune.init_run(mode="offline")
run["steps"] = train()
run.stop()
print("true steps", 8)
