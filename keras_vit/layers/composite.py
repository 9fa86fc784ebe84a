"""Layers made of others, which remember what Keras has made of the dense ones among them."""

from typing import Any

import keras

# Marks a `get_config` that leaves the arguments of `__init__` to Keras.
from keras.src.utils.python_utils import default

# The key of `dense_changes` in configs.
CHANGES = "dense"


class CompositeLayer(keras.layers.Layer):
    """A layer made of others, whose config says what has become of the dense ones among them.

    Keras writes that to the config of the dense layer alone, not to those of the layers around it.
    """

    _changes: dict[str, dict[str, Any]] = {}  # noqa: RUF012, never written to

    @default
    def get_config(self) -> dict[str, Any]:
        changes = dense_changes(self) if self.built else dict(self._changes)
        return {**super().get_config(), **({CHANGES: changes} if changes else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CompositeLayer":
        layer: CompositeLayer = super().from_config(
            {key: value for key, value in config.items() if key != CHANGES}
        )
        layer._changes = config.get(CHANGES, {})
        return layer

    def change_dense(self) -> None:
        """Makes of fresh dense layers what the config said; a subclass builds, then calls this."""
        change_dense(self, self._changes)


def dense_changes(layer: keras.layers.Layer) -> dict[str, dict[str, Any]]:
    """Returns which dense layers inside are quantised or adapted by LoRA, by their number.

    Example:
        >>> from keras_vit.layers import MLP
        >>> mlp = MLP(mlp_dim=8)
        >>> mlp.build((None, None, 4))
        >>> mlp.fc2.enable_lora(2)
        >>> dense_changes(mlp)
        {'1': {'lora_rank': 2, 'lora_alpha': 2}}
    """
    found = {str(place): _change(dense) for place, dense in enumerate(_dense(layer))}
    return {place: change for place, change in found.items() if change}


def change_dense(layer: keras.layers.Layer, changes: dict[str, dict[str, Any]]) -> None:
    """Makes of fresh dense layers inside what `dense_changes` said; their values are to be loaded.

    Raises:
        ValueError: there are not so many dense layers.
    """
    inside = {str(place): dense for place, dense in enumerate(_dense(layer))}
    for place, change in changes.items():
        if place not in inside:
            raise ValueError(
                f"The config changes dense layer {place} of {layer.name!r}, which has only "
                f"{len(inside)}; it is the config of another model."
            )
        dense = inside[place]
        if "mode" in change and dense.quantization_mode is None:
            config = keras.saving.deserialize_keras_object(change["quantization_config"])
            dense.quantize(change["mode"], config=config)
        if "lora_rank" in change and not dense.lora_enabled:
            dense.enable_lora(change["lora_rank"], lora_alpha=change["lora_alpha"])


def without_lora(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns what `dense_changes` said, but for what LoRA changed."""
    kept = {
        place: {key: value for key, value in change.items() if not key.startswith("lora")}
        for place, change in changes.items()
    }
    return {place: change for place, change in kept.items() if change}


def _dense(layer: keras.layers.Layer) -> list[keras.layers.Dense]:
    inside = layer._flatten_layers(include_self=False)
    return [each for each in inside if isinstance(each, keras.layers.Dense)]


def _change(dense: keras.layers.Dense) -> dict[str, Any]:
    change: dict[str, Any] = {}
    if dense.quantization_mode is not None:
        config = keras.saving.serialize_keras_object(dense.quantization_config)
        change |= {"mode": dense.quantization_mode, "quantization_config": config}
    if dense.lora_enabled:
        change |= {"lora_rank": dense.lora_rank, "lora_alpha": dense.lora_alpha}
    return change
