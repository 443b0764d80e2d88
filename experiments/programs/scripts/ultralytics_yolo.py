"""Train a small YOLO on images that are made here."""

from pathlib import Path

import cv2
import numpy as np
from ultralytics import YOLO

for part in ("train", "val"):
    for kind in ("images", "labels"):
        Path("data", kind, part).mkdir(parents=True)
    for number in range(4):
        image = np.random.randint(0, 255, (64, 64, 3), dtype=np.uint8)
        cv2.imwrite(f"data/images/{part}/{number}.jpg", image)
        Path("data", "labels", part, f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: [thing]\n"
)
model = YOLO("yolov8n.yaml")
model.train(
    data="data.yaml",
    project=str(Path("runs").resolve()),
    epochs=1,
    imgsz=64,
    batch=2,
    device=0,
    workers=0,
    amp=False,
    val=False,
    plots=False,
    verbose=False,
    nbs=2,
)
print("true steps", 2)
