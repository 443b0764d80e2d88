"""Train a small YOLO, which classifies, on images that are made here.

The loss of one that detects fails without a number, and a phantom GPU computes none.
"""

from pathlib import Path

import cv2
import numpy as np
from ultralytics import YOLO

IMAGES = 4
for part in ("train", "val", "test"):
    for kind in ("cat", "dog"):
        Path("data", part, kind).mkdir(parents=True)
        for number in range(IMAGES):
            image = np.random.randint(0, 255, (64, 64, 3), dtype=np.uint8)
            cv2.imwrite(f"data/{part}/{kind}/{number}.jpg", image)
YOLO("yolov8n-cls.yaml").train(
    data=str(Path("data").resolve()),
    project=str(Path("runs").resolve()),
    epochs=1,
    imgsz=64,
    batch=2,
    nbs=2,
    device=0,
    workers=0,
    amp=False,
    val=False,
    plots=False,
    verbose=False,
)
print("true steps", 2 * IMAGES // 2)
