"""What others see of a run: its model card, and a repository on the Hugging Face Hub."""

from keras_vit.publishing.card import model_card, write_card
from keras_vit.publishing.hub import Published, push

__all__ = ["Published", "model_card", "push", "write_card"]
