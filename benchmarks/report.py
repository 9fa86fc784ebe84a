"""Reports measurements: tables of medians and ratios, a JSON file, a chart."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CONTENDERS, Case, Target
from benchmarks.measuring import Measured

Figures = Mapping[Case, Mapping[str, Measured]]


def print_case(case: Case, measured: Mapping[str, Measured], *, peak: float) -> None:
    """Prints the table of a case, with ratios to the first contender."""
    if not measured:
        return
    first = next(iter(measured.values()))
    print(f"\n{case}; a {case.precision} matrix product: {peak / 1e9:.0f} GFLOP/s")
    header = ("median s", "images/s", "CPU s", "speed /", "GFLOP/s", "MFU", "MiB", "compile s")
    print(f"{'':44}" + "".join(f"{word:>10}" for word in header))
    for name, each in measured.items():
        seconds = statistics.median(each.seconds)
        rate = case.flops / seconds
        cpu = f"{statistics.median(each.cpu):>10.2f}" if each.cpu else f"{'':>10}"
        # A cold start compiles too, but its seconds have that.
        compiling = "" if case.task == "cold" else f"{each.compiling(case.steps):.1f}"
        print(
            f"{name + ' ' + each.version:44.43}{seconds:>10.4f}{case.batch / seconds:>10.2f}{cpu}"
            f"{speed_ratio(each, first):>10.2f}{rate / 1e9:>10.0f}{rate / peak:>10.1%}"
            f"{each.peak:>10.0f}{compiling:>10}"
        )
        if each.loading:
            print(f"{'':44}of which after the imports: {statistics.median(each.loading):.2f} s")


def print_targets(figures: Figures, targets: Sequence[Target]) -> None:
    """Prints each target with its ratio, and whether it is reached."""
    print("\ntargets (at least)")
    for target in targets:
        measured = ratio(figures, target)
        verdict = (
            "not measured" if measured is None else "yes" if measured >= target.ratio else "NO"
        )
        line = f"{target.ours} / {' or '.join(target.peers)}, {target.figure}: {target.case}"
        text = "" if measured is None else f"{measured:.2f} "
        print(f"  {text:>5}of {target.ratio:.2f}  {verdict:12}  {line}")


def ratio(figures: Figures, target: Target) -> float | None:
    """Returns the ratio of our figure to the best peer's; None if either is missing."""
    ours = figures.get(target.case, {}).get(target.ours)
    peers = figures.get(target.case, {})
    known = [peers[name] for name in target.peers if name in peers]
    if ours is None or not known:
        return None
    if target.figure != "speed":
        # Weights, gradients and momentum, whatever activations the gradient needs.
        fixed = 3 * target.case.weights_mib if target.figure == "activations" else 0.0
        least = min(peer.peak - peer.imported for peer in known)
        return (least - fixed) / (ours.peak - ours.imported - fixed)
    return min(speed_ratio(ours, peer) for peer in known)


def speed_ratio(one: Measured, other: Measured) -> float:
    """Returns how many times as fast as the other one is: the median over the turns."""
    pairs = zip(other.seconds, one.seconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def write_json(path: Path, about: dict[str, Any], figures: Figures) -> None:
    """Writes the figures of every turn of every contender."""
    cases = [
        {
            "case": dataclasses.asdict(case),
            "flops": case.flops,
            "contenders": {name: dataclasses.asdict(each) for name, each in measured.items()},
        }
        for case, measured in figures.items()
    ]
    path.write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n", encoding="utf-8")


def write_chart(path: Path, figures: Figures) -> None:
    """Draws images per second and memory of each contender over the field that varies.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("The chart needs matplotlib; run: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    if len(figures) == 1:
        _draw_bars(speed, memory, *next(iter(figures.items())))
    else:
        _draw_curves(speed, memory, figures)
    figure.savefig(path, dpi=120)


def _draw_bars(speed: Any, memory: Any, case: Case, measured: Mapping[str, Measured]) -> None:
    names = [name for name in reversed(CONTENDERS) if name in measured]
    colors = ["tab:blue" if CONTENDERS[name].is_ours else "0.6" for name in names]
    rates = [case.batch / statistics.median(measured[name].seconds) for name in names]
    bars = speed.barh(names, rates, color=colors)
    speed.bar_label(bars, fmt="%.2f", padding=3)
    bars = memory.barh(names, [measured[name].peak for name in names], color=colors)
    memory.bar_label(bars, fmt="%.0f", padding=3)
    memory.set_yticks([])
    speed.set(xlabel="images per second")
    memory.set(xlabel="peak memory, MiB")
    for axes in (speed, memory):
        axes.margins(x=0.15)


def _draw_curves(speed: Any, memory: Any, figures: Figures) -> None:
    axis = varying(list(figures))
    for name in CONTENDERS:
        known = [(case, each[name]) for case, each in figures.items() if name in each]
        if not known:
            continue
        places = [str(getattr(case, axis)) for case, _ in known]
        style = "o-" if CONTENDERS[name].is_ours else "s--"
        rates = [case.batch / statistics.median(each.seconds) for case, each in known]
        speed.plot(places, rates, style, label=name)
        memory.plot(places, [each.peak for _, each in known], style, label=name)
    speed.set(xlabel=axis.replace("_", " "), ylabel="images per second", ylim=(0, None))
    memory.set(xlabel=axis.replace("_", " "), ylabel="peak memory, MiB", ylim=(0, None))
    speed.legend()


def varying(cases: Sequence[Case]) -> str:
    """Returns the field with the most values among the cases."""
    names = [field.name for field in dataclasses.fields(Case)]
    return max(names, key=lambda name: len({getattr(case, name) for case in cases}))
