"""The table and the chart of `learn_from_few.py`."""

import dataclasses
from pathlib import Path

import matplotlib.figure
import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a way of learning, with its accuracy for each seed."""

    part: str
    name: str
    accuracies: tuple[float, ...]
    trained: float = 1.0  # fraction of the parameters

    @property
    def text(self) -> str:
        """The mean and the standard deviation over seeds."""
        spread = np.std(self.accuracies, ddof=1) if len(self.accuracies) > 1 else 0.0
        return f"{np.mean(self.accuracies):.1%} ± {spread:.1%}"


def table(rows: list[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = [
        "| comparison | way | parameters trained | accuracy | seeds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.part} | {row.name} | {row.trained:.1%} | {row.text} | {len(row.accuracies)} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], file: Path) -> None:
    """Draws a panel for each comparison: every seed a circle, the mean a line."""
    parts = list(dict.fromkeys(row.part for row in rows))
    figure = matplotlib.figure.Figure(figsize=(8, 1 + 0.35 * len(rows)), layout="constrained")
    heights = [sum(row.part == part for row in rows) + 1 for part in parts]
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        shown = [row for row in rows if row.part == part]
        for place, row in enumerate(shown):
            values = 100 * np.array(row.accuracies)
            axes.plot(values, [place] * len(values), "o", color="0.3", fillstyle="none")
            axes.plot([values.mean()] * 2, [place - 0.3, place + 0.3], color="black", linewidth=2)
        axes.set_yticks(range(len(shown)), [row.name for row in shown])
        axes.set(title=part, ylim=(len(shown) - 0.5, -0.5))
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("accuracy on the test images, per cent (o: a seed, |: the mean)")
    figure.savefig(file, dpi=120)
