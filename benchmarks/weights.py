"""Times loading ViT-L/16 from a local file, in keras_vit, timm and transformers.

    python -m benchmarks.weights --rounds 5 --peers-python path/to/python

Each load is a process of its own; the contenders take turns. "load" is the time from the call until
every weight is read once, because a memory-mapped file is not loaded before; "process" is the time
from the start of Python. Memory is the process's peak above that of the imports. "keras_vit,
building alone" reads no file: it makes the layers and variables with uninitialised values.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURE = """
import json, sys, time
start = time.perf_counter()
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024
{imports}
imported, baseline = time.perf_counter(), memory("VmHWM")
path = sys.argv[1]
{load}
loaded = time.perf_counter()
print(json.dumps(dict(imports=imported - start, load=loaded - imported, process=loaded - start,
                      memory=memory("VmHWM") - baseline, version={version})))
"""

CONTENDERS = {
    "keras_vit .npz": (
        "L16.npz",
        "import keras, keras_vit",
        "model = keras_vit.ViTL16(weights=path)\n"
        "sum(float(keras.ops.sum(weight)) for weight in model.weights)",
        "keras_vit.__version__",
    ),
    "keras_vit, building alone": (
        "L16.npz",
        "import keras, keras_vit\nfrom keras_vit.layers.random import overwritten_weights",
        "with overwritten_weights():\n"
        "    model = keras_vit.VisionTransformer(keras_vit.variant('L/16'))",
        "keras_vit.__version__",
    ),
    "timm .npz": (
        "L16.npz",
        "import timm, torch",
        "model = timm.create_model('vit_large_patch16_224', checkpoint_path=path)\n"
        "sum(float(weight.detach().sum()) for weight in model.parameters())",
        "timm.__version__",
    ),
    "timm .safetensors": (
        "timm.safetensors",
        "import timm, torch",
        "model = timm.create_model('vit_large_patch16_224', checkpoint_path=path)\n"
        "sum(float(weight.detach().sum()) for weight in model.parameters())",
        "timm.__version__",
    ),
    "transformers .safetensors": (
        "transformers",
        "import transformers, torch\nfrom transformers import ViTForImageClassification",
        "model = ViTForImageClassification.from_pretrained(path)\n"
        "sum(float(weight.detach().sum()) for weight in model.parameters())",
        "transformers.__version__",
    ),
}

WRITE_OURS = """
import sys, keras_vit
keras_vit.weights.save_npz(keras_vit.VisionTransformer(keras_vit.variant("L/16")), sys.argv[1])
"""

# The peers write the same network in their own layouts.
WRITE_PEERS = """
import sys, timm, safetensors.torch, transformers
folder = sys.argv[1]
model = timm.create_model("vit_large_patch16_224", pretrained=False)
safetensors.torch.save_file(model.state_dict(), folder + "/timm.safetensors")
config = transformers.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                                intermediate_size=4096, num_labels=1000)
transformers.ViTForImageClassification(config).save_pretrained(folder + "/transformers")
"""


def main() -> None:
    """Writes the files, measures, and prints the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument(
        "--peers-python",
        default=sys.executable,
        help="a Python that has timm and transformers (default: this one)",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON (default: do not)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, WRITE_OURS, f"{folder}/L16.npz")
        _run(arguments.peers_python, WRITE_PEERS, folder)
        size = Path(folder, "L16.npz").stat().st_size / 2**20
        rounds = [_turn(folder, arguments.peers_python) for _ in range(arguments.rounds + 1)]
    rounds = rounds[1:]  # the first fills the page cache
    _report(rounds, size)
    if arguments.out:
        arguments.out.write_text(json.dumps({"file_mib": size, "rounds": rounds}, indent=1))


def _turn(folder: str, peers_python: str) -> dict[str, dict[str, float]]:
    figures = {}
    for name, (file, imports, load, version) in CONTENDERS.items():
        python = sys.executable if name.startswith("keras_vit") else peers_python
        code = MEASURE.format(imports=imports, load=load, version=version)
        figures[name] = json.loads(_run(python, code, f"{folder}/{file}"))
    return figures


def _run(python: str, code: str, *arguments: str) -> str:
    process = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{python} failed:\n{process.stderr[-2000:]}")
    return process.stdout.strip().splitlines()[-1] if process.stdout.strip() else ""


def _report(rounds: list[dict[str, dict[str, float]]], size: float) -> None:
    print(f"ViT-L/16 from a file of {size:.0f} MiB, medians of {len(rounds)} turns")
    print(f"{'':<34}{'import s':>9}{'load s':>9}{'process s':>10}{'peak MiB':>10}{'/ file':>8}")
    for name in CONTENDERS:
        turns = [figures[name] for figures in rounds]
        values = {
            key: statistics.median(turn[key] for turn in turns)
            for key in ("imports", "load", "process", "memory")
        }
        print(
            f"{name + ' ' + str(turns[0]['version']):<34}{values['imports']:>9.2f}"
            f"{values['load']:>9.2f}{values['process']:>10.2f}{values['memory']:>10.0f}"
            f"{values['memory'] / size:>8.2f}"
        )
    ours = next(iter(CONTENDERS))
    for name in list(CONTENDERS)[1:]:
        ratios = {
            key: statistics.median(m[name][key] / m[ours][key] for m in rounds)
            for key in ("load", "process", "memory")
        }
        print(
            f"{name} / keras_vit, turn by turn: load {ratios['load']:.2f}, process "
            f"{ratios['process']:.2f}, memory {ratios['memory']:.2f}"
        )


if __name__ == "__main__":
    main()
