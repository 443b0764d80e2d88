"""Train and log to MLflow, in a local file."""

import mlflow
from training import train

mlflow.set_tracking_uri("sqlite:///mlflow.db")
with mlflow.start_run():
    mlflow.log_metric("steps", train())
print("true steps", 8)
