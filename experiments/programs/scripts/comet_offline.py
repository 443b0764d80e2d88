"""Train and log to Comet, offline."""

import comet_ml
from training import train

experiment = comet_ml.OfflineExperiment(project_name="programs", offline_directory="comet")
experiment.log_metric("steps", train())
experiment.end()
print("true steps", 8)
