"""The public example scripts that are run, with the flags that make them short."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.example_scripts import data
from experiments.example_scripts.data import Data

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True)
class Case:
    """A script of a repository, and how it is run.

    Attributes:
        script: path in the checkout; it runs in the script's folder.
        arguments: the script's arguments.
        launcher: Python's arguments before the script.
        data: what the script reads.
        gpus: phantom GPUs that the script sees.
    """

    repository: str
    script: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    data: tuple[Data, ...] = ()
    gpus: int = 2

    @property
    def name(self) -> str:
        """The script as it is listed."""
        return f"{self.repository}/{self.script}"


def _examples(
    script: str, *arguments: str, launcher: tuple[str, ...] = (), data: tuple[Data, ...] = ()
) -> Case:
    return Case("examples", script, arguments, launcher, data)


DIGITS = ((data.mnist, "data"),)
WORDS = ((data.wikitext, "word_language_model/data/wikitext-2"),)
DIGITS_OF_LIGHTNING = (
    (data.mnist, "Datasets"),
    (data.whole_mnist, "examples/Datasets"),
    (data.mnist, "examples/pytorch/basics/data"),
)
TEXT = (
    (data.characters, "data/shakespeare_char"),
    (data.characters, "data/openwebtext"),
)
SHORT_GPT = (
    *("--dataset=shakespeare_char", "--compile=False", "--max_iters=4", "--eval_iters=2"),
    *("--eval_interval=2", "--log_interval=1", "--batch_size=4", "--block_size=64"),
    *("--n_layer=2", "--n_head=2", "--n_embd=64", "--always_save_checkpoint=True"),
)
SHORT_TRAINER = (
    *("--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.devices=1"),
    *("--trainer.limit_val_batches=2", "--trainer.limit_test_batches=2"),
    "--trainer.limit_predict_batches=2",
)
TIMM = ("images", "--model", "resnet18", "--batch-size", "4", "--workers", "1")

CASES = (
    _examples("mnist/main.py", "--epochs", "1", data=DIGITS),
    _examples("mnist_rnn/main.py", "--accel", "--epochs", "1", data=DIGITS),
    _examples(
        "mnist_forward_forward/main.py",
        "--epochs",
        "2",
        data=((data.mnist, "mnist_forward_forward/data"),),
    ),
    _examples("mnist_hogwild/main.py", "--cuda", "--epochs", "1", data=DIGITS),
    _examples("siamese_network/main.py", "--epochs", "1", data=DIGITS),
    _examples("vae/main.py", "--epochs", "2", data=(*DIGITS, (data.nothing, "vae/results"))),
    _examples(
        *("dcgan/main.py", "--dataset", "fake", "--accel", "--dry-run", "--batchSize", "8"),
        *("--workers", "1"),
    ),
    _examples(
        *("imagenet/main.py", "../images", "-a", "resnet18", "--epochs", "1", "-b", "4", "-j", "1"),
        *("--gpu", "0"),
        data=((data.images, "images"),),
    ),
    _examples("word_language_model/main.py", "--accel", "--epochs", "1", data=WORDS),
    _examples(
        *("word_language_model/main.py", "--accel", "--epochs", "1", "--model", "Transformer"),
        data=WORDS,
    ),
    _examples(
        *("super_resolution/main.py", "--upscale_factor", "3", "--accel", "--nEpochs", "1"),
        data=((data.bsds, "super_resolution/dataset/BSDS300/images"),),
    ),
    _examples(
        *("fast_neural_style/neural_style/neural_style.py", "train", "--accel", "--epochs", "1"),
        *("--dataset", "../../images/train", "--save-model-dir", "."),
        *("--style-image", "../../images/val/class0/0.jpg"),
        data=((data.images, "images"), (data.vgg16, "torch_home/hub/checkpoints")),
    ),
    _examples(
        "time_sequence_prediction/train.py",
        "--steps",
        "1",
        data=((data.sine_waves, "time_sequence_prediction"),),
    ),
    _examples("regression/main.py"),
    _examples("distributed/ddp-tutorial-series/single_gpu.py", "2", "9"),
    _examples("distributed/ddp-tutorial-series/multigpu.py", "2", "9"),
    _examples(
        *("distributed/ddp-tutorial-series/multigpu_torchrun.py", "2", "9"), launcher=TORCHRUN
    ),
    _examples("distributed/FSDP2/example.py", launcher=TORCHRUN),
    _examples("distributed/tensor_parallelism/tensor_parallel_example.py", launcher=TORCHRUN),
    Case("nanoGPT", "train.py", SHORT_GPT, data=TEXT),
    Case(
        *("nanoGPT", "train.py", SHORT_GPT[:-1], TORCHRUN),
        data=TEXT,
    ),
    Case(
        "nanoGPT",
        "bench.py",
        ("--compile=False", "--batch_size=2", "--block_size=64"),
        data=TEXT,
    ),
    Case(
        *("pytorch-image-models", "train.py", (*TIMM, "--epochs", "1", "--pin-mem")),
        data=((data.images, "images"),),
    ),
    Case(
        *("pytorch-image-models", "validate.py", (*TIMM, "--checkpoint", "resnet18.pth")),
        data=((data.images, "images"), (data.resnet18, ".")),
    ),
    Case(
        "pytorch-image-models",
        "benchmark.py",
        ("--model", "resnet18", "--bench", "train", "--num-bench-iter", "10", "-b", "4"),
    ),
    Case("pytorch-lightning", "examples/pytorch/bug_report/bug_report_model.py"),
    Case(
        *("pytorch-lightning", "examples/pytorch/basics/autoencoder.py"),
        SHORT_TRAINER,
        data=DIGITS_OF_LIGHTNING,
    ),
    Case(
        *("pytorch-lightning", "examples/pytorch/basics/backbone_image_classifier.py"),
        SHORT_TRAINER,
        data=DIGITS_OF_LIGHTNING,
    ),
    Case(
        *("pytorch-lightning", "examples/fabric/image_classifier/train_fabric.py"),
        ("--epochs", "1", "--batch-size", "64"),
        data=DIGITS_OF_LIGHTNING,
        gpus=1,
    ),
    Case(
        *("pytorch-lightning", "examples/fabric/kfold_cv/train_fabric.py"),
        ("--epochs", "1", "--folds", "2"),
        data=DIGITS_OF_LIGHTNING,
        gpus=1,
    ),
)
