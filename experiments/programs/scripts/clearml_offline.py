"""Train and log to ClearML, offline."""

from clearml import Task

Task.set_offline(offline_mode=True)
task = Task.init("programs", "train", auto_connect_frameworks={"pytorch": True})
from training import train  # noqa: E402

task.get_logger().report_single_value("steps", train())
task.close()
print("true steps", 8)
