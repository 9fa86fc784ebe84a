"""Measures, on the digits, what helps to learn from little: four comparisons, a table, a chart.

  pretraining   few-shot accuracy after masked patch prediction, against random initialisation
  positions     how tokens know their place, against not knowing it
  lora          low-rank matrices at rank 8, against full fine-tuning from 0-4 to 5-9
  distillation  a student of 200 labels and a bigger teacher, who names the images that have none,
                against the same student alone

Every number is of the 359 test images. What had to be chosen (learning rates, regularisation, the
kind of distillation) was chosen on the 179 validation images, with another seed.

examples:
  python examples/learn_from_few.py --out few            # all four: about 20 minutes on two cores
  python examples/learn_from_few.py lora --seeds 3
  python examples/learn_from_few.py --quick --out quick  # a minute, to see that it runs
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from few_learner import SIZE, Learner, accuracy, fresh
from few_report import Row, draw, table

import keras_vit
from keras_vit.data import Split, load_digits
from keras_vit.evaluation import few_shot
from keras_vit.training import DistillationModel, MaskedPatchModel

SHOTS = (1, 5, 10)
# Few-shot regressions are tried with each; big_vision's 1,024 is meant for 768 features and more.
STRENGTHS = (0.1, 1.0, 10.0, 100.0)
# Seeds of the choices, which no reported number has.
CHOOSING = 1000
LABELS = 200
CONFIG = keras_vit.ViTConfig(
    input_shape=(*SIZE, 3),
    patch_size=4,
    hidden_dim=64,
    mlp_dim=128,
    num_heads=4,
    num_layers=2,
    classes=10,
    include_preprocessing=True,
)
TEACHER = dataclasses.replace(CONFIG, hidden_dim=128, mlp_dim=256)
ADAPTED = ("qkv", "out", "fc1")
# Learning rates that are tried.
TUNINGS = {
    "full fine-tuning": [(1e-3, ()), (3e-4, ())],
    "LoRA at rank 8": [(1e-2, ADAPTED), (2e-2, ADAPTED), (3e-2, ADAPTED)],
}
KINDS = [(kind, has_token) for kind in ("soft", "hard") for has_token in (False, True)]
POSITIONS = {
    "none": None,
    "learned 1-D": "learned",
    "learned 2-D": "learned_2d",
    "sin-cos 2-D": "sincos_2d",
    "relative": "relative",
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is done: seeds reported, training steps, and whether anything is chosen anew."""

    seeds: int
    steps: int
    choose: bool

    def best(
        self, options: Iterable[Any], validate: Callable[[Any], float], *, default: Any
    ) -> Any:
        """Returns the option of highest validation accuracy; without choosing, the default."""
        if not self.choose:
            return default
        found = {option: validate(option) for option in options}
        for option, value in found.items():
            print(f"  on validation images: {option}: {value:.1%}", flush=True)
        return max(found, key=found.__getitem__)


def pretraining(scale: Scale) -> list[Row]:
    """Few-shot accuracy of random features, and of features after masked patch prediction."""
    data = load_digits()
    config = dataclasses.replace(CONFIG, pooling="avg", class_token=False)
    learner = Learner(MaskedPatchModel(config, seed=0), steps=4 * scale.steps)
    vit = learner.model.vit

    def start(name: str, seed: int) -> None:
        learner.model.set_weights(fresh(learner.model, seed))
        if name == "masked patches":
            learner.learn(data.train, seed=seed)

    def measure(test: Split, strength: float) -> list[tuple[float, ...]]:
        results = few_shot(
            vit, train=data.train, test=test, shots=SHOTS, seeds=5, regularization=strength
        )
        return [result.accuracies for result in results]

    rows = []
    for name in ("random initialisation", "masked patches"):
        if scale.choose:
            start(name, CHOOSING)
        strength = scale.best(
            STRENGTHS, lambda option: np.mean(measure(data.validation, option)), default=1.0
        )
        found = []
        for seed in range(scale.seeds):
            start(name, seed)  # its own start, pre-training and draw of the labelled images
            found.append([each[seed % 5] for each in measure(data.test, strength)])
        for count, values in zip(SHOTS, zip(*found, strict=True), strict=True):
            shots = "1 shot" if count == 1 else f"{count} shots"
            rows.append(Row("pretraining", f"{name}, {shots}", values))
    return rows


def positions(scale: Scale) -> list[Row]:
    """Accuracy with each kind of position embedding, and with none."""
    data = load_digits()
    rows = []
    for name, kind in POSITIONS.items():
        config = dataclasses.replace(CONFIG, position_embedding=kind)
        learner = Learner(keras_vit.VisionTransformer(config), steps=scale.steps)
        found = []
        for seed in range(scale.seeds):
            learner.learn(data.train, seed=seed)
            found.append(accuracy(learner.model, data.test))
        rows.append(Row("positions", name, tuple(found)))
    return rows


def lora(scale: Scale) -> list[Row]:
    """Full fine-tuning and LoRA at rank 8 of a model of 0 to 4 on 5 to 9."""
    data = load_digits()
    low, high = part(data.train, 0), part(data.train, 5)
    validation, test = part(data.validation, 5), part(data.test, 5)
    config = dataclasses.replace(CONFIG, hidden_dim=192, mlp_dim=768, num_heads=3, classes=5)
    plain = keras_vit.VisionTransformer(config)
    adapted = keras_vit.lora(plain, rank=8, targets=ADAPTED)
    learners = {
        (): Learner(plain, steps=2 * scale.steps),
        ADAPTED: Learner(adapted, steps=2 * scale.steps),
    }

    @functools.cache
    def learnt(seed: int) -> list[np.ndarray]:
        learners[()].learn(low, seed=seed)
        plain.get_layer("head").kernel.assign(np.zeros((config.hidden_dim, 5)))  # other classes
        return plain.get_weights()

    def tune(seed: int, option: tuple[float, Any]) -> keras.Model:
        rate, targets = option
        plain.set_weights(learnt(seed))
        start = plain
        if targets:
            keras.utils.set_random_seed(seed)
            start = keras_vit.lora(plain, rank=8, targets=targets)
        learners[targets].learn(high, seed=seed, start=start.get_weights(), rate=rate)
        return learners[targets].model

    rows = []
    for name, tried in TUNINGS.items():
        chosen = scale.best(
            tried, lambda each: accuracy(tune(CHOOSING, each), validation), default=tried[0]
        )
        found = tuple(accuracy(tune(seed, chosen), test) for seed in range(scale.seeds))
        variables = learners[chosen[1]].model.trainable_variables
        share = sum(variable.shape.num_elements() for variable in variables)
        rows.append(Row("lora", name, found, share / keras_vit.parameter_count(config)))
    return rows


def distillation(scale: Scale) -> list[Row]:
    """A small student of few labels, alone and after a teacher that names all images."""
    data = load_digits()
    few = np.random.default_rng(0).permutation(len(data.train))[:LABELS]
    labelled = data.train.take(few)
    targets = np.full(len(data.train), -1)
    targets[few] = data.train.targets[few]
    everything = dataclasses.replace(data.train, targets=targets)
    small = dataclasses.replace(CONFIG, hidden_dim=32, mlp_dim=64, num_heads=2)
    teacher = Learner(keras_vit.VisionTransformer(TEACHER), steps=scale.steps)
    alone = Learner(keras_vit.VisionTransformer(small), steps=scale.steps)
    students: dict[Any, Learner] = {}

    def distilled(seed: int, option: tuple[str, bool]) -> keras.Model:
        kind, has_token = option
        if option not in students:
            config = dataclasses.replace(small, distillation_token=has_token)
            student = keras_vit.VisionTransformer(config)
            model = DistillationModel(student, teacher.model, distillation=kind, weight=0.8)
            students[option] = Learner(model, steps=scale.steps)
        students[option].learn(everything, seed=seed)
        return students[option].model.student

    if scale.choose:
        teacher.learn(data.train, seed=CHOOSING)
    chosen = scale.best(
        KINDS, lambda each: accuracy(distilled(CHOOSING, each), data.validation), default=KINDS[0]
    )
    found: dict[str, list[float]] = {}
    for seed in range(scale.seeds):
        teacher.learn(data.train, seed=seed)
        alone.learn(labelled, seed=seed)
        models = {
            f"teacher of {len(data.train)} labels": teacher.model,
            f"student of {LABELS} labels": alone.model,
            f"student of {LABELS} labels, distilled": distilled(seed, chosen),
        }
        for name, model in models.items():
            found.setdefault(name, []).append(accuracy(model, data.test))
    return [Row("distillation", name, tuple(values)) for name, values in found.items()]


def part(split: Split, first: int) -> Split:
    """Returns the images of five digits, counted from zero."""
    chosen = split.take(np.flatnonzero((split.targets >= first) & (split.targets < first + 5)))
    return dataclasses.replace(chosen, targets=chosen.targets - first)


PARTS = {
    "pretraining": pretraining,
    "positions": positions,
    "lora": lora,
    "distillation": distillation,
}


def main() -> None:
    """Reads the arguments, measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {names}; all if none")
    parser.add_argument("--out", metavar="DIR", help="write few.json, few.md and few.png there")
    parser.add_argument("--seeds", type=int, default=5, help="how often all is done (default: 5)")
    parser.add_argument("--steps", type=int, default=250, help="batches of 64 (default: 250)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few steps, nothing chosen: to see it run"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {min(unknown)!r}; choose of {names}")
    scale = Scale(arguments.seeds, arguments.steps, choose=True)
    if arguments.quick:
        scale = Scale(seeds=1, steps=30, choose=False)
    rows: list[Row] = []
    for part in arguments.parts or PARTS:
        for row in PARTS[part](scale):
            rows.append(row)
            print(f"{part}: {row.name}: {row.text}, {row.trained:.1%} trained", flush=True)
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "few.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
        (out / "few.md").write_text(table(rows))
        draw(rows, out / "few.png")


if __name__ == "__main__":
    main()
