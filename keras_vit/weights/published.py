"""The tables behind the catalogue: which files are published, and what is reported of them.

Sources: the README (its table of recommended checkpoints) and the two notebooks of
google-research/vision_transformer, commit c6de1e53; `vision_transformer.py`,
`vision_transformer_hybrid.py` and `results/results-imagenet.csv` of
huggingface/pytorch-image-models (timm), commit aa4b5850. Sizes are as `gsutil ls -lh` or the README
print them.
"""

from typing import NamedTuple

# Who measured an accuracy. timm resizes bicubically and crops the middle 90 % at 224 pixels; the
# authors resize the whole image bilinearly.
README = "google-research/vision_transformer, README.md"
NOTEBOOK = "google-research/vision_transformer, vit_jax_augreg.ipynb"
PAPER = "arXiv 2010.11929, Table 5"
TIMM = "huggingface/pytorch-image-models, results/results-imagenet.csv"


class Published(NamedTuple):
    """A file: its stem, its size, its ImageNet top-1 accuracy in percent and who reports that."""

    stem: str
    size: str | None = None
    accuracy: float | None = None
    measured_by: str | None = None


# ImageNet-21k, recommended by the README's table; B/8 by the notebook's.
_21K = "-i21k-300ep-lr_0.001-aug_"
AUGREG_21K = (
    Published(f"Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "37 MiB"),
    Published(f"S_32{_21K}none-wd_0.1-do_0.0-sd_0.0", "118 MiB"),
    Published(f"S_16{_21K}light1-wd_0.03-do_0.0-sd_0.0", "115 MiB"),
    Published(f"B_32{_21K}light1-wd_0.1-do_0.0-sd_0.0", "398 MiB"),
    Published(f"B_16{_21K}medium1-wd_0.1-do_0.0-sd_0.0", "391 MiB"),
    Published(f"B_8{_21K}medium2-wd_0.1-do_0.0-sd_0.0"),
    Published(f"L_16{_21K}strong1-wd_0.1-do_0.0-sd_0.0", "1243 MiB"),
    Published(f"R_Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "40 MiB"),
    Published(f"R26_S_32{_21K}light1-wd_0.1-do_0.0-sd_0.0", "170 MiB"),
    Published(f"R50_L_32{_21K}medium1-wd_0.1-do_0.1-sd_0.1", "1337 MiB"),
)


def _tuned(head: str, rate: str, size: int, accuracy: float, measured_by: str) -> Published:
    stem = f"{head}--imagenet2012-steps_20k-lr_{rate}-res_{size}"
    return Published(stem, None, accuracy, measured_by)


# Fine-tuned on ImageNet-1k: at 384 pixels the README's choice, at 224 timm's (B/8: notebook's).
AUGREG_21K_1K = (
    _tuned(f"Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "0.03", 384, 78.22, README),
    _tuned(f"S_32{_21K}none-wd_0.1-do_0.0-sd_0.0", "0.01", 384, 79.58, README),
    _tuned(f"S_16{_21K}light1-wd_0.03-do_0.0-sd_0.0", "0.03", 384, 83.73, README),
    _tuned(f"B_32{_21K}light1-wd_0.1-do_0.0-sd_0.0", "0.01", 384, 83.59, README),
    _tuned(f"B_16{_21K}medium1-wd_0.1-do_0.0-sd_0.0", "0.03", 384, 85.49, README),
    _tuned(f"B_8{_21K}medium2-wd_0.1-do_0.0-sd_0.0", "0.03", 224, 85.58, NOTEBOOK),
    _tuned(f"L_16{_21K}strong1-wd_0.1-do_0.0-sd_0.0", "0.01", 384, 85.59, README),
    _tuned(f"R_Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "0.03", 384, 75.40, README),
    _tuned(f"R26_S_32{_21K}light1-wd_0.1-do_0.0-sd_0.0", "0.01", 384, 83.85, README),
    _tuned(f"R50_L_32{_21K}medium1-wd_0.1-do_0.1-sd_0.1", "0.01", 384, 85.99, README),
    _tuned(f"Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "0.03", 224, 75.452, TIMM),
    _tuned(f"S_32{_21K}light1-wd_0.03-do_0.0-sd_0.0", "0.03", 224, 76.010, TIMM),
    _tuned(f"S_16{_21K}light1-wd_0.03-do_0.0-sd_0.0", "0.03", 224, 81.402, TIMM),
    _tuned(f"B_32{_21K}medium1-wd_0.03-do_0.0-sd_0.0", "0.03", 224, 80.732, TIMM),
    _tuned(f"B_16{_21K}medium1-wd_0.1-do_0.0-sd_0.0", "0.01", 224, 84.534, TIMM),
    _tuned(f"L_16{_21K}medium1-wd_0.1-do_0.1-sd_0.1", "0.01", 224, 85.856, TIMM),
    _tuned(f"R_Ti_16{_21K}none-wd_0.03-do_0.0-sd_0.0", "0.03", 224, 71.800, TIMM),
    _tuned(f"R26_S_32{_21K}light0-wd_0.03-do_0.1-sd_0.1", "0.03", 224, 81.856, TIMM),
    _tuned(f"R50_L_32{_21K}medium1-wd_0.1-do_0.1-sd_0.1", "0.01", 224, 84.434, TIMM),
)

# ImageNet-1k alone: timm's choices.
_1K = "-i1k-300ep-lr_0.001-aug_"
AUGREG_1K = (
    _tuned(f"S_16{_1K}medium2-wd_0.1-do_0.0-sd_0.0", "0.01", 224, 78.842, TIMM),
    _tuned(f"S_16{_1K}medium2-wd_0.1-do_0.0-sd_0.0", "0.01", 384, 81.130, TIMM),
    _tuned(f"B_32{_1K}medium2-wd_0.1-do_0.1-sd_0.1", "0.01", 224, 74.908, TIMM),
    _tuned(f"B_32{_1K}medium2-wd_0.1-do_0.1-sd_0.1", "0.01", 384, 78.750, TIMM),
    _tuned(f"B_16{_1K}strong2-wd_0.1-do_0.1-sd_0.1", "0.01", 224, 79.154, TIMM),
    _tuned(f"B_16{_1K}strong2-wd_0.1-do_0.1-sd_0.1", "0.01", 384, 81.102, TIMM),
)

# The paper's own. The ImageNet-21k classifiers are zeros (vision_transformer issues 10, 32, 252).
ORIGINAL_21K = (
    Published("ViT-B_8", "393.72 MiB"),
    Published("ViT-B_16", "393.69 MiB"),
    Published("ViT-B_32", "400.01 MiB"),
    Published("ViT-L_16", "1.22 GiB"),
    Published("ViT-L_32", "1.23 GiB"),
    Published("ViT-H_14", "2.46 GiB"),
    Published("R26+ViT-B_32", "450.23 MiB"),
    Published("R50+ViT-B_16", "439.85 MiB"),
    Published("R50+ViT-L_32", "1.31 GiB"),
)

# A name without "-224" is of 384 pixels. The README expects 81.2 and 82.7 % of the "-224" files.
ORIGINAL_21K_1K = (
    Published("ViT-B_8", "334.78 MiB"),
    Published("ViT-B_16-224", "330.29 MiB", 81.2, README),
    Published("ViT-B_16", "331.4 MiB", 84.212, TIMM),
    Published("ViT-B_32", "336.89 MiB", 81.28, PAPER),
    Published("ViT-L_16-224", "1.13 GiB", 82.7, README),
    Published("ViT-L_16", "1.14 GiB", 85.15, PAPER),
    Published("ViT-L_32", "1.14 GiB", 81.508, TIMM),
    Published("R50+ViT-B_16", "377.57 MiB", 84.988, TIMM),
)

# ImageNet-1k with sharpness-aware minimisation, at 224 pixels. S/16 has three times the size of its
# parameters: it seems to hold the optimizer's state too.
SAM = (
    Published("ViT-S_16", "252.57 MiB"),
    Published("ViT-B_16", "330.3 MiB", 80.246, TIMM),
    Published("ViT-B_32", "336.61 MiB", 73.704, TIMM),
    Published("ViT-L_16", "1.13 GiB"),
    Published("ViT-L_32", "1.14 GiB"),
)
