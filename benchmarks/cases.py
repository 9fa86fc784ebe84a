"""The cases to measure, the contenders, and the targets of the suites."""

import argparse
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

# Width, MLP width, heads, layers; arXiv 2010.11929, Table 1, and arXiv 2106.10270, Table 2.
SIZES = {
    "tiny": (64, 128, 2, 2),  # not published: to try the command
    "Ti": (192, 768, 3, 12),
    "S": (384, 1536, 6, 12),
    "B": (768, 3072, 12, 12),
    "L": (1024, 4096, 16, 24),
    "H": (1280, 5120, 16, 32),
}
CLASSES = 1000
TASKS = ("inference", "training", "cold")
PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A task to measure for every contender.

    Attributes:
        task: "inference" of a batch, a "training" step (forward, backward, SGD), or a "cold" start:
            from the start of the process to the first prediction with weights from a local file.
        variant: size and patch, as "B/16".
        layers: number of blocks; 0 for the variant's own.
        replicas: logical devices that share the batch of a training step.
        steps: runs in a turn: an accelerator computes one while the next is prepared.

    Raises:
        ValueError: the fields do not fit each other.
    """

    task: str = "inference"
    variant: str = "B/16"
    image_size: int = 224
    batch: int = 8
    precision: str = "float32"
    layers: int = 0
    replicas: int = 1
    steps: int = 1

    def __post_init__(self) -> None:
        size, _, patch = self.variant.partition("/")
        if size not in SIZES or not patch.isdigit() or not int(patch):
            known = ", ".join(SIZES)
            raise ValueError(
                f"A variant is a size of {known}, and a patch size, as B/16. "
                f"Received: {self.variant}."
            )
        if self.image_size < 1 or self.image_size % int(patch):
            raise ValueError(
                f"Patches of {patch} pixels do not divide images of {self.image_size} pixels."
            )
        if self.batch < 1 or self.replicas < 1 or self.batch % self.replicas:
            raise ValueError(
                "The replicas divide the batch. "
                f"Received: a batch of {self.batch}, {self.replicas} replicas."
            )
        if self.steps < 1:
            raise ValueError(f"A turn has 1 step or more. Received: {self.steps}.")
        if self.layers < 0:
            raise ValueError(f"A network has 1 block or more. Received: {self.layers}.")

    @property
    def sizes(self) -> dict[str, int]:
        """The network's sizes by name."""
        size, _, patch = self.variant.partition("/")
        width, mlp, heads, layers = SIZES[size]
        return {
            "image_size": self.image_size,
            "patch_size": int(patch),
            "hidden_dim": width,
            "mlp_dim": mlp,
            "num_heads": heads,
            "num_layers": self.layers or layers,
        }

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches and the class token."""
        return (self.image_size // self.sizes["patch_size"]) ** 2 + 1

    @property
    def flops(self) -> float:
        """Floating-point operations of one run: those of its matrix products."""
        sizes = self.sizes
        width, patch = sizes["hidden_dim"], sizes["patch_size"]
        tokens = self.tokens
        patches = tokens - 1
        block = tokens * self._block_elements + 2 * tokens**2 * width
        products = patches * 3 * patch**2 * width + sizes["num_layers"] * block + width * CLASSES
        return 2.0 * products * self.batch * (3 if self.task == "training" else 1)

    @property
    def weights_mib(self) -> float:
        """Memory of the network's matrices in float32."""
        sizes = self.sizes
        patch = sizes["patch_size"]
        ends = (3 * patch**2 + CLASSES + self.tokens - 1) * sizes["hidden_dim"]
        return 4 * (sizes["num_layers"] * self._block_elements + ends) / 2**20

    @property
    def _block_elements(self) -> int:
        """Elements of the matrices of one block."""
        sizes = self.sizes
        return 4 * sizes["hidden_dim"] ** 2 + 2 * sizes["hidden_dim"] * sizes["mlp_dim"]

    def __str__(self) -> str:
        extras = f", {self.layers} layers" if self.layers else ""
        extras += f", {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.task}, {self.variant} at {self.image_size}, batch {self.batch}, "
            f"{self.precision}{extras}"
        )


@dataclasses.dataclass(frozen=True)
class Contender:
    """A library, or a way to use it, that runs cases.

    Attributes:
        module: module of `benchmarks` that makes its runs.
        needs: modules that must be installed.
        tasks: the tasks that it runs.
        precisions: the precisions that it runs.
        is_ours: whether it is keras_vit.

    Only keras_vit on TensorFlow trains on several replicas.
    """

    module: str
    needs: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    precisions: tuple[str, ...] = PRECISIONS
    is_ours: bool = False

    def takes(self, case: Case) -> bool:
        """Whether it can run the case."""
        takes_replicas = self.module == _KERAS and self.is_ours and case.task == "training"
        return (
            case.task in self.tasks
            and case.precision in self.precisions
            and (case.replicas == 1 or takes_replicas)
        )

    def python(self, peers_python: str) -> str:
        """Returns the Python that runs it: this one for keras_vit and its files."""
        return sys.executable if self.is_ours or self.module == _FILES else peers_python


_INFERENCE = ("inference",)
_KERAS, _JAX, _TORCH, _FILES = "keras_runs", "jax_runs", "torch_runs", "file_runs"
CONTENDERS = {
    "keras_vit": Contender(_KERAS, ("tensorflow", "keras"), is_ours=True),
    "keras_vit tf.function": Contender(_KERAS, ("tensorflow", "keras"), _INFERENCE, is_ours=True),
    "keras_vit remat": Contender(_KERAS, ("tensorflow", "keras"), ("training",), is_ours=True),
    # Half of the patches in training, arXiv 2212.00794.
    "keras_vit patch dropout": Contender(
        _KERAS, ("tensorflow", "keras"), ("training",), is_ours=True
    ),
    # DINOv2's network beside the original's, with as many tokens.
    "keras_vit DINOv2": Contender(
        _KERAS, ("tensorflow", "keras"), ("inference", "training"), is_ours=True
    ),
    "keras_vit SavedModel": Contender(
        _FILES, ("tensorflow", "keras"), _INFERENCE, ("float32",), is_ours=True
    ),
    "keras_vit on JAX": Contender(_JAX, ("jax", "keras"), is_ours=True),
    "KerasHub": Contender(_KERAS, ("keras_hub",)),
    "timm": Contender(_TORCH, ("torch", "timm")),
    "timm compiled": Contender(_TORCH, ("torch", "timm"), ("inference", "training")),
    "Hugging Face": Contender(_TORCH, ("torch", "transformers")),
    "OpenVINO": Contender(_FILES, ("openvino", "keras", "onnx"), _INFERENCE),
    "ONNX Runtime": Contender(_FILES, ("onnxruntime", "keras", "onnx"), _INFERENCE, ("float32",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The least ratio of a figure of ours to the best peer's.

    Attributes:
        case: the case.
        ours: a contender.
        peers: contenders; the best one with a measurement counts.
        ratio: the ratio; above 1, ours is better.
        figure: "speed", runs per second; "memory", the peak above that of the imports; or
            "activations", that memory without weights, gradients and momentum.
    """

    case: Case
    ours: str
    peers: tuple[str, ...]
    ratio: float
    figure: str = "speed"


def installed(peers_python: str) -> list[str]:
    """Returns the contenders whose modules are installed in the Python that runs them."""
    modules = sorted({module for contender in CONTENDERS.values() for module in contender.needs})
    pythons = {contender.python(peers_python) for contender in CONTENDERS.values()}
    importable = {python: _importable(modules, python) for python in pythons}
    return [
        name
        for name, contender in CONTENDERS.items()
        if importable[contender.python(peers_python)].issuperset(contender.needs)
    ]


def _importable(modules: Iterable[str], python: str) -> set[str]:
    code = "import importlib.util as u, sys; print(*filter(u.find_spec, sys.argv[1:]))"
    try:
        process = subprocess.run(
            [python, "-c", code, *modules], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"The peers' Python must be a Python. Received: {python} ({error})."
        ) from None
    return set(process.stdout.split())


def case_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every command that measures one case."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="B/16", help="size and patch (%(default)s)")
    for name, default in (("--image-size", 224), ("--batch", 8)):
        parser.add_argument(name, type=int, default=default, metavar="N", help="(%(default)s)")
    return parser


def product(**axes: Iterable[Any]) -> list[Case]:
    """Makes a case for every combination of the fields' values."""
    return [
        Case(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]
