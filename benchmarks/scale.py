"""Says on paper, and by the compiler, what a large training needs; it trains nothing.

    python -m benchmarks.scale                       # ImageNet-21k, L/16 and H/14
    python -m benchmarks.scale --models g/14 --batch 2048 --remat
    python -m benchmarks.scale --compile gpu:8       # XLA for 8 H100, beside the paper
    python -m benchmarks.scale --compile tpu:v5e:16x16 --batch 4096 --extrapolate
    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m benchmarks.scale --compile cpu:8 --models S/16 --batch 64

The tables on paper come from a config alone. `--compile` needs KERAS_BACKEND=jax, and the compiler
of the target: jax-cuda12-plugin and jax-cuda12-pjrt, or libtpu, in JAX's version. No such device is
needed. The training is AdamW in mixed bfloat16 on `--mesh fsdp=N`.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras_vit

CLASSES, IMAGES, EPOCHS = 21_843, 14_197_122, 300  # ImageNet-21k, and AugReg's epochs
GIB, GB = 2**30, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices, with what their makers say of them.

    Attributes:
        devices: how many.
        hosts: computers that they are in.
        memory: of one device, bytes.
        peak: its bfloat16 products, FLOP/s.
        link: bytes that it sends a second to the other devices.
        mfu: share of the peak in a training step that the tables assume.
        has_kernels: whether attention keeps none of its weights there.
        batch: images in a step, of all devices.
    """

    devices: int
    hosts: int
    memory: float
    peak: float
    link: float
    mfu: float
    has_kernels: bool
    batch: int


MACHINES = {
    # 989 TFLOP/s; NVLink's 900 GB/s are of both directions. docs/speed.md measured 0.40 and 0.37 of
    # the 989 in a step of L/16 and H/14 on one, which nothing exchanges.
    "8 H100": Machine(
        devices=8, hosts=1, memory=80 * GIB, peak=989e12, link=450e9, mfu=0.36, has_kernels=True,
        batch=1024,
    ),
    # https://docs.cloud.google.com/tpu/docs/v5e; 400 GB/s are of both directions. The MFU is a
    # guess: nothing was measured on a TPU.
    "TPU v5e-256": Machine(
        devices=256, hosts=32, memory=16 * GIB, peak=197e12, link=200e9, mfu=0.35,
        has_kernels=False, batch=4096,
    ),
}  # fmt: skip


def parts(config: Any, *, batch: int, devices: int, has_kernels: bool = True) -> dict[str, float]:
    """Returns the bytes on one device by part, at the peak of a step under `fsdp`.

    A device keeps its share of the weights, of Adam's two averages and of the gradients in float32.
    It gathers the weights in bfloat16, once for forward and backward. Without `remat`, each block
    keeps in bfloat16 for the gradient: its input and that of the MLP, both normalised inputs,
    queries, keys and values, what attention returns (8 widths), and the MLP's hidden layer before
    and after GELU with GELU's own factor (3 hidden widths). Attention also keeps its weights
    in bfloat16, or with kernels one float32 for each head and token. With `remat` a block keeps its
    input, and one block has all.
    """
    count, images = keras_vit.parameter_count(config), batch / devices
    share, tokens = 4 * count / devices, num_tokens(config)
    block = 2 * (8 * config.hidden_dim + 3 * config.mlp_dim)
    block += config.num_heads * (4 if has_kernels else 2 * tokens)
    kept = config.num_layers * block
    if config.remat:
        kept = config.num_layers * 2 * config.hidden_dim + block
    return {
        "weights": share,
        "optimizer": 2 * share,
        "gradients": share,
        "gathered weights": gathered(config),
        "activations": images * tokens * kept,
        # Targets, logits and their gradient are float32.
        "batch": images * 4 * (image_values(config) + 3 * config.classes),
    }


def num_tokens(config: Any) -> int:
    """Returns the tokens of an image with those that are no patches."""
    rows, columns = config.grid
    return int(rows * columns + config.num_prefix_tokens)


def gathered(config: Any) -> float:
    """Returns the bytes of all weights as a step multiplies by them: the head in float32."""
    head: int = config.hidden_dim * config.classes
    return 2.0 * keras_vit.parameter_count(config) + 2.0 * head


def sent(config: Any, devices: int) -> dict[str, float]:
    """Returns the bytes that a device sends in a step under `fsdp`, in rings.

    Recomputed blocks gather their weights a second time.
    """
    whole = gathered(config) * (devices - 1) / devices
    return {"weights": whole * (1 + config.remat), "gradients": whole}


def flops(config: Any) -> float:
    """Returns the operations of a training step for one image: three times its matrix products."""
    tokens, width = num_tokens(config), config.hidden_dim
    patches = config.grid[0] * config.grid[1]
    block = tokens * (4 * width**2 + 2 * width * config.mlp_dim) + 2 * tokens**2 * width
    ends = patches * config.patch_size**2 * config.input_shape[2] * width + width * config.classes
    products: float = config.num_layers * block + ends
    return 3 * 2 * products


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("batch", "layers", "cores_rate", "disk"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0. Received: {value}.")
    try:
        configs = {name: _config(name, options) for name in options.models}
        if options.compile:
            _print_compiled(configs, options)
            return
    except ValueError as error:
        parser.error(str(error))
    for name in options.machines:
        machine = MACHINES[name]
        batch = options.batch or machine.batch
        if batch % machine.devices:
            parser.error(f"{machine.devices} devices divide the batch. Received: --batch {batch}.")
        print(f"\n## {name}, batch {batch}\n")
        _print_table({model: column(config, machine, options)
                      for model, config in configs.items()})  # fmt: skip


def column(config: Any, machine: Machine, options: argparse.Namespace) -> dict[str, str]:
    """Returns the figures of one model on one machine, as text."""
    batch = options.batch or machine.batch
    sizes = parts(config, batch=batch, devices=machine.devices, has_kernels=machine.has_kernels)
    rows = {f"{name}, GiB a device": f"{size / GIB:.2f}" for name, size in sizes.items()}
    total = sum(sizes.values())
    rows["sum, GiB a device"] = f"{total / GIB:.1f} of {machine.memory / GIB:.0f}"
    seconds = flops(config) * batch / machine.devices / (machine.peak * machine.mfu)
    transfers = sent(config, machine.devices)
    rate = batch / seconds
    checkpoint = 12 * keras_vit.parameter_count(config)
    return {
        **rows,
        **{f"{name} sent, GB a device and step": f"{v / GB:.2f}" for name, v in transfers.items()},
        "sending, ms": f"{1000 * sum(transfers.values()) / machine.link:.1f}",
        f"a step at an MFU of {machine.mfu:.0%} of {machine.peak / 1e12:.0f} TFLOP/s, ms":
            f"{1000 * seconds:.0f}",
        "images/s": f"{rate:,.0f}",
        "cores that decode and augment, a host": f"{rate / options.cores_rate / machine.hosts:.0f}",
        f"{EPOCHS} epochs, days": f"{EPOCHS * IMAGES / rate / 86400:.1f}",
        "checkpoint, GB": f"{checkpoint / GB:.2f}",
        f"writing it at {options.disk / GB:.1f} GB/s, s": f"{checkpoint / options.disk:.0f}",
    }  # fmt: skip


def _print_table(columns: dict[str, dict[str, str]]) -> None:
    names = list(next(iter(columns.values())))
    print(f"| | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for name in names:
        print(f"| {name} | {' | '.join(each[name] for each in columns.values())} |")


def _print_compiled(configs: dict[str, Any], options: argparse.Namespace) -> None:
    import keras

    if keras.backend.backend() != "jax":
        raise ValueError(
            f"--compile needs KERAS_BACKEND=jax. Received: {keras.backend.backend()!r}."
        )
    from benchmarks import ahead

    devices = len(ahead.devices_of(options.compile))
    platform = options.compile.partition(":")[0]
    batch = options.batch or 8 * devices
    if batch % devices:
        raise ValueError(f"{devices} devices divide the batch. Received: --batch {batch}.")
    rows: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        done = compiled(config, batch=batch, options=options)
        sizes = parts(config, batch=batch, devices=devices, has_kernels=platform == "gpu")
        state = sizes["weights"] + sizes["optimizer"]
        state += 4 * batch / devices * (config.classes + image_values(config))
        rest = sum(sizes.values()) - state
        rows[f"{name}, batch {batch}"] = {
            "state, GiB a device": _beside(done.state, state, GIB),
            "temporary, GiB a device": _beside(done.temporary, rest, GIB),
            "sent, GB a device": _beside(done.sent, sum(sent(config, devices).values()), GB),
            "transfers": done.transfers,
            "operations, TFLOP a device": _beside(
                done.flops, flops(config) * batch / devices, 1e12
            ),
            "read and written, GB a device": f"{done.bytes / GB:.1f}",
            "kernels of this package": done.kernels,
        }
    print(f"{options.compile}, {devices} devices: compiled (on paper, deviation)\n")
    _print_table(rows)


class Figures(NamedTuple):
    """What the compiler says of a step on one device: bytes, operations, and the rest in words."""

    state: float
    temporary: float
    sent: float
    flops: float
    bytes: float
    transfers: str
    kernels: str


def compiled(config: Any, *, batch: int, options: argparse.Namespace) -> Figures:
    """Returns the compiler's figures; extrapolated, if asked, from 2 and 4 blocks to all."""
    from benchmarks import ahead

    def figures(layers: int) -> Figures:
        changed = dataclasses.replace(config, num_layers=layers)
        done = ahead.compile_step(changed, batch=batch, mesh="fsdp", target=options.compile)
        sending = sum(done.collectives.sent.values())
        operations = done.flops or done.work.products + done.work.attention
        counts = (done.collectives.count, done.work.kernels)
        words = [", ".join(f"{n} {kind}" for kind, n in each.items()) for each in counts]
        return Figures(done.state, done.temporary, sending, operations, done.work.bytes, *words)

    if not options.extrapolate:
        return figures(config.num_layers)
    two, four = figures(2), figures(4)
    steps = (config.num_layers - 2) / 2
    # All but the two that are words.
    sums = [a + steps * (b - a) for a, b in zip(two[:-2], four[:-2], strict=True)]
    return Figures(*sums, *(f"of 4 blocks: {words}" for words in four[-2:]))


def image_values(config: Any) -> int:
    """Returns the values of one image."""
    height, width, channels = config.input_shape
    return int(height * width * channels)


def _beside(compiled: float, paper: float, unit: float) -> str:
    deviation = f", {compiled / paper - 1:+.0%}" if paper else ""
    return f"{compiled / unit:.2f} ({paper / unit:.2f}{deviation})"


def _config(name: str, options: argparse.Namespace) -> Any:
    config = keras_vit.variant(name)
    if config.resnet_layers is not None:
        raise ValueError(f"The convolutions of a hybrid are not counted here. Received: {name}.")
    layers = options.layers or config.num_layers
    return dataclasses.replace(config, classes=CLASSES, remat=options.remat, num_layers=layers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["L/16", "H/14"], metavar="NAME", help="published variants")
    add("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    add("--batch", type=int, metavar="N", help="of all devices (default: each machine's)")
    add("--layers", type=int, metavar="N", help="blocks (default: the variant's)")
    add("--remat", action="store_true", help="recompute blocks for the gradient")
    add(
        "--cores-rate",
        type=float,
        default=370.0,
        metavar="N",
        help="images that one core decodes, crops and augments a second (default: 370)",
    )
    add("--disk", type=float, default=1e9, metavar="N", help="bytes written a second (1e9)")
    add("--extrapolate", action="store_true", help="compile 2 and 4 blocks in place of all")
    add("--compile", metavar="TARGET", help="ask XLA: cpu:8, gpu:8 or tpu:v5e:16x16")
    return parser


if __name__ == "__main__":
    main()
