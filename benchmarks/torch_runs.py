"""timm, eager and compiled, and Hugging Face transformers, on PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CLASSES, Case

Run = Callable[[], Any]


def import_framework(name: str) -> None:
    """Imports the contender."""
    import torch  # noqa: F401

    if name == "Hugging Face":
        from transformers import ViTForImageClassification  # noqa: F401
    else:
        import timm  # noqa: F401


def version(name: str) -> str:
    """Returns the contender's version, and PyTorch's."""
    import torch

    if name == "Hugging Face":
        import transformers as package
    else:
        import timm as package
    return f"{package.__version__} on PyTorch {torch.__version__}"


def make_run(name: str, case: Case, folder: Path) -> Run:
    """Returns a function that runs the case once."""
    import torch

    model, images = make_model(name, case), images_of(case)
    if case.task == "training":
        return _training(name, case, model, images)
    model = model.to(_device(), _dtype(case)).eval()
    images = images.to(_device(), _dtype(case))
    if name == "timm compiled":
        model = torch.compile(model)

    def run() -> Any:
        with torch.inference_mode():
            return _logits(model(images))

    return run


def finish(result: Any) -> None:
    """Waits until a run ends."""
    result.detach().float().cpu().numpy()


def peak() -> float | None:
    """Returns the peak memory of the accelerator in MiB; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def make_model(name: str, case: Case) -> Any:
    """Makes the network with random weights."""
    sizes = case.sizes
    if name == "Hugging Face":
        import transformers

        return transformers.ViTForImageClassification(_hugging_face_config(case))
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=case.image_size,
        patch_size=sizes["patch_size"],
        embed_dim=sizes["hidden_dim"],
        depth=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        mlp_ratio=sizes["mlp_dim"] / sizes["hidden_dim"],
        num_classes=CLASSES,
    )


def images_of(case: Case) -> Any:
    """Returns a batch of random images in [-1, 1], channels first."""
    import torch

    shape = (case.batch, 3, case.image_size, case.image_size)
    return torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32))


def write_weights(name: str, case: Case, folder: Path) -> None:
    """Writes the file that a cold start reads."""
    if name == "Hugging Face":
        make_model(name, case).save_pretrained(folder / "hugging_face")
        return
    import safetensors.torch

    safetensors.torch.save_file(make_model(name, case).state_dict(), folder / "timm.safetensors")


def first_prediction(name: str, case: Case, folder: Path) -> None:
    """Loads the network from its file and predicts once."""
    import torch

    if name == "Hugging Face":
        from transformers import ViTForImageClassification

        model = ViTForImageClassification.from_pretrained(folder / "hugging_face")
    else:
        import safetensors.torch

        model = make_model(name, case)
        model.load_state_dict(safetensors.torch.load_file(folder / "timm.safetensors"))
    model = model.to(_dtype(case)).eval()
    with torch.inference_mode():
        _logits(model(images_of(case).to(_dtype(case)))).float().numpy()


def _hugging_face_config(case: Case) -> Any:
    import transformers

    sizes = case.sizes
    return transformers.ViTConfig(
        image_size=case.image_size,
        patch_size=sizes["patch_size"],
        hidden_size=sizes["hidden_dim"],
        intermediate_size=sizes["mlp_dim"],
        num_attention_heads=sizes["num_heads"],
        num_hidden_layers=sizes["num_layers"],
        num_labels=CLASSES,
    )


def _training(name: str, case: Case, model: Any, images: Any) -> Run:
    import torch

    device = _device()
    model, images = model.to(device).train(), images.to(device)
    on_accelerator = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **on_accelerator)
    labels = torch.arange(case.batch, device=device) % CLASSES
    compute = torch.compile(model) if name == "timm compiled" else model

    def run() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=case.precision == "bfloat16"):
            loss = torch.nn.functional.cross_entropy(_logits(compute(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def _logits(output: Any) -> Any:
    return getattr(output, "logits", output)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(case: Case) -> Any:
    import torch

    return getattr(torch, case.precision)
