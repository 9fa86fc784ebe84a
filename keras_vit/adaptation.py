"""Fine-tuning on little hardware: low-rank adaptation (LoRA), adapter files, freezing by depth."""

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import safetensors.numpy

from keras_vit.atomic import whole_file
from keras_vit.config import ViTConfig
from keras_vit.layers import TokenDense
from keras_vit.layers.dense import CHANGES, FROZEN, without_lora
from keras_vit.limits import check_file, is_number, shown
from keras_vit.model import (
    VisionTransformer,
    assign_copy,
    backbone_of,
    path_inside,
    weights_by_path,
)
from keras_vit.weights.arrays import FLOATS, read_safetensors, safetensors_metadata

# The dense products of a block; the paper adapts query and value (arXiv 2106.09685, Section 4.2).
TARGETS = ("qkv", "out", "fc1", "fc2")
_PARTS = {"qkv": "attention", "out": "attention", "fc1": "mlp", "fc2": "mlp"}


@keras.saving.register_keras_serializable(package="keras_vit")
class LoRAVisionTransformer(VisionTransformer):
    """A Vision Transformer that trains low-rank matrices beside its kernels, and its classifier.

    `keras_vit.lora` makes one of a model, `keras_vit.merge_lora` a plain model of it.

    Args:
        config: as of a `VisionTransformer`.
        rank: width of the low-rank matrices.
        targets: which dense products of each block, of `TARGETS`.
        alpha: their product is scaled by alpha / rank; None for rank.
        name: name of the model.
        dtype: dtype policy of its layers.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        rank: int,
        targets: str | Iterable[str],
        alpha: float | None = None,
        name: str | None = "vit",
        dtype: Any = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(config, name=name, dtype=dtype, trainable=trainable)
        self.rank, self.targets, self.alpha = rank, _target_names(targets), alpha
        for layer in self.adapted_layers():
            # Up to 1 / sqrt(width): microsoft/LoRA, loralib/layers.py, reset_parameters. One for
            # each layer: an initializer draws its seed where it is made.
            uniform = keras.initializers.VarianceScaling(
                1 / 3, mode="fan_in", distribution="uniform"
            )
            layer.enable_lora(rank, alpha, uniform)
        for variable in self.trainable_variables:
            variable.trainable = _is_adapter(variable.path)

    def adapted_layers(self) -> list[TokenDense]:
        """Returns the dense layers with low-rank matrices, in the order of the network."""
        blocks = [self.get_layer(f"block_{index}") for index in range(self.config.num_layers)]
        return [
            getattr(getattr(block, _PARTS[target]), target)
            for block in blocks
            for target in TARGETS
            if target in self.targets
        ]

    def get_config(self) -> dict[str, Any]:
        own = {"rank": self.rank, "targets": list(self.targets), "alpha": self.alpha}
        return {**super().get_config(), **own}


def lora(
    model: VisionTransformer,
    *,
    rank: int = 8,
    targets: str | Iterable[str] = ("qkv",),
    alpha: float | None = None,
) -> LoRAVisionTransformer:
    """Returns the same model, ready to be fine-tuned by few parameters (LoRA, arXiv 2106.09685).

    It answers as the given one until it is trained. Trainable are the low-rank matrices and the
    classifier; everything else is frozen. The given model stays as it is.

    Example:
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=64, mlp_dim=256,
        ...                    num_heads=2, num_layers=2, classes=3)
        >>> adapted = lora(VisionTransformer(config), rank=2)
        >>> [variable.path for variable in adapted.trainable_variables][:2]
        ['block_0/attention/qkv/lora_kernel_a', 'block_0/attention/qkv/lora_kernel_b']
        >>> sum(variable.shape.num_elements() for variable in adapted.trainable_variables)
        1219

    Args:
        model: the model to fine-tune. To use it inside a model of your own, adapt it first.
        rank: width of the low-rank matrices.
        targets: which dense products of each block, any of "qkv", "out", "fc1", "fc2".
        alpha: their product is scaled by alpha / rank; None for rank, a scale of 1.

    Raises:
        TypeError: the model is not a `VisionTransformer`.
        ValueError: the model is adapted already, there is no such target, or the rank does not fit.
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            "lora takes a VisionTransformer; adapt the one inside your model, then build your "
            f"model with it. Received: {type(model).__name__}."
        )
    if isinstance(model, LoRAVisionTransformer):
        raise ValueError("The model is adapted already; merge_lora makes a plain one of it.")
    names = _target_names(targets)
    settings = {**model.get_config(), "rank": rank, "targets": names, "alpha": alpha}
    settings.pop(FROZEN, None)
    adapted = LoRAVisionTransformer.from_config(settings)
    _copy_weights(model, adapted)
    return adapted


def merge_lora(model: LoRAVisionTransformer) -> VisionTransformer:
    """Returns a plain model with the low-rank matrices added to the kernels, at no extra cost.

    Example:
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> type(merge_lora(lora(VisionTransformer(config), rank=2))).__name__
        'VisionTransformer'

    Raises:
        TypeError: the model is not adapted.
        ValueError: an adapted kernel is quantised, so nothing can be added to it.
    """
    _check_adapted(model)
    quantised = [layer.path for layer in model.adapted_layers() if layer.quantization_mode]
    if quantised:
        raise ValueError(
            f"The kernel of {quantised[0]!r} is quantised, so the adapter cannot be added "
            "to it; merge the adapter into the model before quantisation, and quantise the result."
        )
    settings = model.get_config()
    for name in ("rank", "targets", "alpha", FROZEN):
        settings.pop(name, None)
    settings[CHANGES] = without_lora(settings.get(CHANGES, {}))
    merged = VisionTransformer.from_config(settings)
    _copy_weights(model, merged)
    kernels = weights_by_path(merged)
    for layer in model.adapted_layers():
        change = keras.ops.matmul(layer.lora_kernel_a.value, layer.lora_kernel_b.value)
        kernel = kernels[path_inside(model, f"{layer.path}/kernel")]
        kernel.assign_add(layer.lora_alpha / layer.lora_rank * change)
    return merged


def save_adapter(model: LoRAVisionTransformer, path: str | Path) -> Path:
    """Writes what `lora` made trainable alone: the low-rank matrices and the classifier.

    Example:
        >>> import tempfile
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> adapted = lora(VisionTransformer(config), rank=2)
        >>> save_adapter(adapted, Path(tempfile.mkdtemp()) / "adapter.safetensors").name
        'adapter.safetensors'

    Args:
        model: an adapted model.
        path: the file to write or replace; its name ends in .safetensors.

    Returns:
        The path.

    Raises:
        TypeError: the model is not adapted.
        ValueError: the name does not end in .safetensors.
    """
    _check_adapted(model)
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"An adapter is a .safetensors file. Received: {str(path)!r}.")
    tensors = {
        variable.path: np.asarray(keras.ops.convert_to_numpy(variable))
        for variable in model.weights
        if _is_adapter(variable.path)
    }
    settings = json.dumps({"rank": model.rank, "targets": model.targets, "alpha": model.alpha})
    metadata = {"lora": settings, "sha256": _checksum(settings, tensors)}
    with whole_file(path) as temporary:
        safetensors.numpy.save_file(tensors, temporary, metadata=metadata)
    return path


def load_adapter(model: VisionTransformer, path: str | Path) -> LoRAVisionTransformer:
    """Returns a model adapted by a file of `save_adapter`; the given one stays as it is.

    Example:
        >>> import tempfile
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> model = VisionTransformer(config)
        >>> file = save_adapter(lora(model, rank=2), Path(tempfile.mkdtemp()) / "a.safetensors")
        >>> load_adapter(model, file).rank
        2

    Args:
        model: the plain model that the adapter was trained on, with as many classes.
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: the model is not a `VisionTransformer`.
        ValueError: the file is not an adapter, or not of such a model.
    """
    path = Path(path)
    check_file(path)
    metadata = safetensors_metadata(path)
    tensors = {name: array.read() for name, array in read_safetensors(path).items()}
    settings = str(metadata.get("lora"))
    try:
        rank, targets, alpha = operator.itemgetter("rank", "targets", "alpha")(json.loads(settings))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path} is not an adapter of save_adapter.") from None
    if metadata.get("sha256") != _checksum(settings, tensors):
        raise ValueError(f"{path} is damaged: it does not have its own checksum; fetch it again.")
    ranks = {value.shape[-1:] for name, value in tensors.items() if name.endswith("lora_kernel_a")}
    is_scale = alpha is None or is_number(alpha)
    if ranks != {(rank,)} or not is_scale or not isinstance(targets, list) or _odd(tensors):
        raise ValueError(
            f"{path} is damaged: rank {shown(rank)}, targets {shown(targets)}, alpha "
            f"{shown(alpha)} or the arrays {shown(_odd(tensors))} are not those of an adapter."
        )
    adapted = lora(model, rank=rank, targets=targets, alpha=alpha)
    variables = {v.path: v for v in adapted.weights if _is_adapter(v.path)}
    differing = sorted(
        set(variables) ^ set(tensors)
        | {n for n in set(variables) & set(tensors) if variables[n].shape != tensors[n].shape}
    )
    if differing:
        raise ValueError(
            f"{path} is the adapter of another model: {differing[0]!r} "
            + (f"and {len(differing) - 1} more differ." if len(differing) > 1 else "differs.")
            + " Build the model that it was trained on, with as many layers and classes."
        )
    for name, variable in variables.items():
        variable.assign(tensors[name])
    return adapted


def freeze(model: keras.Model, blocks: int) -> None:
    """Freezes the first blocks of a Vision Transformer, and everything in it before them.

    Example:
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=3)
        >>> model = VisionTransformer(config)
        >>> freeze(model, blocks=2)
        >>> model.trainable_variables[0].path
        'block_2/attention_norm/gamma'

    Args:
        model: the model to change: a `VisionTransformer`, or one with your layers around it, which
            stay as they are.
        blocks: how many blocks to freeze; 0 freezes the patch embedding and positions (and the
            stem of a hybrid) alone. What was frozen deeper before trains again.

    Raises:
        ValueError: the model has not so many blocks, or not one Vision Transformer inside.
    """
    config, vit = backbone_of(model)
    if not 0 <= blocks <= config.num_layers:
        raise ValueError(
            f"blocks must be from 0 to {config.num_layers}, the model's number of blocks. "
            f"Received: blocks={blocks!r}."
        )
    layers = vit.layers
    if not isinstance(vit, VisionTransformer):  # yours are among them
        layers = [each for each in layers if type(each).__module__.startswith("keras_vit.")]
    names = [layer.name for layer in layers]
    starts = [f"positions_{blocks}", f"block_{blocks}", "encoder_norm", "pooling"]
    starts += ["representation", "head"]
    first = min((names.index(name) for name in starts if name in names), default=len(names))
    for place, layer in enumerate(layers):
        layer.trainable = place >= first


def _target_names(targets: str | Iterable[str]) -> tuple[str, ...]:
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    unknown = [target for target in names if target not in TARGETS]
    if unknown or not names:
        raise ValueError(
            f"targets must be some of {', '.join(TARGETS)}, the dense products of a block. "
            f"Received: targets={names}."
        )
    return tuple(target for target in TARGETS if target in names)


def _is_adapter(path: str) -> bool:
    is_thin = path.rsplit("/", 1)[-1] in ("lora_kernel_a", "lora_kernel_b")
    return is_thin or path.startswith(("head/", "distillation_head/"))


def _checksum(settings: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Returns a SHA-256 of what an adapter holds, which .safetensors has no place for itself."""
    digest = hashlib.sha256(settings.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape} {tensors[name].dtype}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _odd(tensors: Mapping[str, np.ndarray]) -> list[str]:
    return [n for n, v in tensors.items() if v.dtype not in FLOATS or not np.isfinite(v).all()]


def _copy_weights(source: VisionTransformer, target: VisionTransformer) -> None:
    values = weights_by_path(source)
    for path, variable in weights_by_path(target).items():
        if path in values:
            assign_copy(variable, values[path])


def _check_adapted(model: keras.Model) -> None:
    if not isinstance(model, LoRAVisionTransformer):
        raise TypeError(
            f"This takes a model that keras_vit.lora made. Received: {type(model).__name__}."
        )
