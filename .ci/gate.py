"""Runs the checks and tests in parts; says at the end what passed, what failed and what was flaky.

    .ci/run                    what every change must pass
    .ci/full [PART ...]        everything else, or these parts of it; --list names them

Each part runs whatever failed before it. A test that fails runs again, alone, when the others of
its part are done: what fails twice fails the part, what passes then is printed as FLAKY. More than
five failures, or tests that cannot be collected, fail at once. It needs the standard library alone.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FAILURES = 5
MINUTES = 30  # of one step; a part takes less than 20
SHOWN_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
WORKERS = ("-n", "2", "--dist", "worksteal")

Variables = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Command:
    """A program of the environment that must exit with 0."""

    words: tuple[str, ...]
    variables: Variables = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tests:
    """Tests that must pass, at the latest when each that failed runs alone."""

    arguments: tuple[str, ...]
    variables: Variables = dataclasses.field(default_factory=dict)


Step = Command | Tests


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step or a part came to; `failed` and `flaky` say each test with its first message."""

    failed: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    seconds: float = 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.failed + other.failed, self.flaky + other.flaky, self.seconds + other.seconds
        )


def python(*words: str, **variables: str) -> Command:
    return Command((sys.executable, *words), variables)


def pytest(*arguments: str, **variables: str) -> Tests:
    return Tests((*WORKERS, *arguments), variables)


def files(*names: str) -> tuple[str, ...]:
    """Returns the test files of these names, which may hold a star."""
    found = [sorted((ROOT / "tests").glob(f"test_{name}.py")) for name in names]
    assert all(found), names
    return tuple(str(path.relative_to(ROOT)) for paths in found for path in paths)


# The core runs where TensorFlow, matplotlib and scikit-learn cannot be imported.
ALONE = {"PYTHONPATH": str(ROOT / ".ci" / "without_tensorflow")}
# XLA compiles much that runs once: without optimisation it does so fastest, and once for all
# processes. What another process is writing at that moment is compiled again, with a warning.
JAX = {
    "KERAS_BACKEND": "jax",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "PYTEST_ADDOPTS": "-W 'ignore:Error reading persistent' -W 'ignore:Error writing persistent'",
}
TORCH = str(ROOT / ".torch")  # where the part `torch` installs it, for no other part to import

# Other processors are stood in for by what their features would make TensorFlow and JAX do.
PROCESSORS: tuple[Variables, ...] = (
    {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "TF_ENABLE_ONEDNN_OPTS": "1",  # keras_vit would turn it off, see its environment
        "PYTEST_ADDOPTS": "-k 'not bfloat16 and not precision'",  # these would end the process
    },
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"TF_ENABLE_ONEDNN_OPTS": "0"},
)
JAX_AVX2 = {**JAX, "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
NUMERIC = (
    *("adaptation", "backend*", "explain*", "golden", "layers*", "model*", "optimizers*"),
    *("preprocessing", "steps_by_hand", "training_ways", "weights_families"),
)
ON_JAX = ("backend", "backend_jax*", "backend_plain", "golden", "model", "model_[!a]*")
NUMERIC_ON_JAX = (*ON_JAX, "steps_by_hand")

# The gate's own tests, with the newest version of each package.
NEWEST = """
folder=$(mktemp -d) && python3 -m venv "$folder" &&
"$folder/bin/pip" install -q -e ".[test]" &&
PATH="$folder/bin:$PATH" python .ci/gate.py run tests jax
"""

BROWSER = ("demo", "explain_page", "pages", "reporting")
DOCS = ("benchmarks", "campaigns", "docs_*", "examples", "walks")
EXPORT = ("export_*", "keras_export", "model_any_size")
TRAINING = ("adaptation", "backend_trainer", "optimizers*", "training_[!k]*", "cli_pretrain")
CORE = (
    *(*ON_JAX, "applications", "config", "layers_patch_dropout"),
    *("steps_by_hand", "weights_checkpoint", "weights_families"),
    *("weights_formats", "weights_positions"),
)


def gate() -> dict[str, tuple[Step, ...]]:
    """Returns the parts that every change must pass."""
    return {
        "checks": (
            Command(("ruff", "check", ".")),
            Command(("ruff", "format", "--check", ".")),
            Command(("lint-imports",)),
            Command(("mypy",)),
        ),
        "tests": (Tests(readme_arguments()),),
        "jax": (
            pytest(*files("golden", "backend_plain", "backend_jax_trainer"), **JAX, **ALONE),
            pytest(*files("training_jax"), **JAX),
        ),
        "campaigns": tuple(campaigns(weights=600, images=300, downloads=40)),
        "wheel": (python(".ci/wheel.py"),),
    }


def readme_arguments() -> tuple[str, ...]:
    """Returns what README gives to pytest."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if '-e ".[test]"' in line)
    return tuple(line.partition("-m pytest ")[2].split())


def full() -> dict[str, tuple[Step, ...]]:
    """Returns the parts of everything else."""
    chosen = files(*BROWSER, *DOCS, *EXPORT, *TRAINING, "digits", "training_kills")
    other = sorted({*files("*")} - {*chosen})
    only = ("-m", "full", "--timeout=1200")
    everything = ("-m", "", "--timeout=1200")
    return {
        "training": (
            pytest(*only, *files(*TRAINING)),
            pytest(*everything, *files("training_kills"), KERAS_VIT_TEST_KILLS="6"),
        ),
        "export": (pytest(*only, *files(*EXPORT)),),
        "browser": (chromium(), pytest(*everything, *files(*BROWSER))),
        "docs": (pytest(*only, *files(*DOCS)),),
        "other": (pytest(*only, *other),),
        "jax": (
            pytest(*everything, *files(*CORE), **JAX, **ALONE),
            pytest(
                *everything,
                *files("training_jax*", "training_checkpoints"),
                *files("benchmarks", "explain_attention"),
                **JAX,
            ),
        ),
        "torch": (
            # By pip itself: its index may have a build for this machine's processor.
            python("-m", "pip", "install", "-q", "--target", TORCH, "torch==2.13.0"),
            pytest(
                *files("backend", "backend_plain", "golden"),
                KERAS_BACKEND="torch",
                PYTHONPATH=f"{ALONE['PYTHONPATH']}{os.pathsep}{TORCH}",
            ),
        ),
        "processors": (
            *(pytest(*files(*NUMERIC), **each) for each in PROCESSORS),
            pytest(*files(*NUMERIC_ON_JAX), **ALONE, **JAX_AVX2),
        ),
        "campaigns": tuple(campaigns(weights=6600, images=3000, downloads=400)),
        "newest": (Command(("sh", "-c", NEWEST)),),
        "wheel": (Command(("bash", ".ci/wheel")),),
        # One process: its tests share a training.
        "digits": (Tests((*everything, *files("digits")), {"KERAS_VIT_TEST_EPOCHS": "200"}),),
    }


def campaigns(**counts: int) -> Iterator[Step]:
    for name, count in counts.items():
        yield python("-m", "campaigns", name, "--count", str(count))


def chromium() -> Command:
    """Installs a browser where there is none."""
    install = "apt-get update -qq && apt-get install -y -qq chromium >/dev/null"
    root = "" if os.geteuid() == 0 else "sudo "
    has = "command -v chromium || command -v google-chrome"
    return Command(("sh", "-c", f"{has} || {{ {root}sh -c '{install}'; }}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", nargs="?", choices=["run", "full"], default="run")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="parts to run; all, if none is named"
    )
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    chosen = parser.parse_args()
    parts = gate() if chosen.which == "run" else full()
    if unknown := [name for name in chosen.parts if name not in parts]:
        parser.error(f"no part {unknown[0]!r}; the parts are {', '.join(parts)}")
    if chosen.list:
        print(*parts, sep="\n")
        return 0
    outcomes = {name: run_part(name, parts[name]) for name in chosen.parts or parts}
    return summarize(outcomes)


def run_part(name: str, steps: tuple[Step, ...]) -> Outcome:
    """Runs every step of a part, whatever fails."""
    outcome = Outcome()
    for step in steps:
        words = step.words if isinstance(step, Command) else ("pytest", *step.arguments)
        settings = [f"{key}={value}" for key, value in step.variables.items()]
        print(f"\n== {name}: {' '.join([*settings, *words])}"[:300], flush=True)
        start = time.monotonic()
        done = run_command(step) if isinstance(step, Command) else run_tests(step)
        outcome += dataclasses.replace(done, seconds=time.monotonic() - start)
    return outcome


def run_command(command: Command) -> Outcome:
    code, _ = execute(command.words, command.variables)
    return Outcome() if code == 0 else Outcome((f"{' '.join(command.words)}: exit code {code}",))


def run_tests(step: Tests) -> Outcome:
    """Runs tests side by side, and what failed once more, each alone."""
    with tempfile.TemporaryDirectory() as cache:
        words = (sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", "-r", "fEs", "-q")
        limits = (f"--maxfail={MOST_FAILURES + 1}", "--durations=25")
        code, lines = execute((*words, *limits, *step.arguments), step.variables)
        record = Path(cache, "v", "cache", "lastfailed")
        failed = list(json.loads(record.read_text())) if record.exists() else []
    if code == 0:
        return Outcome()
    # Anything but failed tests: files that cannot be collected, no test at all, an error of pytest.
    if code != 1 or not failed or any("::" not in name for name in failed):
        return Outcome((f"pytest: exit code {code}", *(message(name, lines) for name in failed)))
    if len(failed) > MOST_FAILURES:
        return Outcome(tuple(message(name, lines) for name in failed))
    outcome = Outcome()
    for name in failed:
        print(f"\n== again, alone: {name}", flush=True)
        again = ("-p", "no:cacheprovider", "-q", "-m", "", "--timeout=1200", name)
        code, _ = execute((sys.executable, "-m", "pytest", *again), step.variables)
        said = (message(name, lines),)
        outcome += Outcome(flaky=said) if code == 0 else Outcome(failed=said)
    return outcome


def message(name: str, lines: list[str]) -> str:
    """Returns pytest's own line on a test that failed."""
    marks = (f"FAILED {name}", f"ERROR {name}")
    return next((line.partition(" ")[2] for line in lines if line.startswith(marks)), name)[:300]


def execute(words: tuple[str, ...], variables: Variables) -> tuple[int, list[str]]:
    """Runs a program, shows what it prints, returns its exit code and lines; kills what hangs."""
    lines = []
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        # A process that hangs says nothing: the signal comes while its next line is waited for.
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.alarm(MINUTES * 60)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    signal.alarm(0)
    return process.returncode, lines


def summarize(outcomes: dict[str, Outcome]) -> int:
    """Prints the last lines, and returns the exit code."""
    print(f"\n== {machine()}")
    for name, outcome in outcomes.items():
        state = "failed" if outcome.failed else "flaky" if outcome.flaky else "passed"
        print(f"{name:12} {outcome.seconds:6.0f} s  {state}")
    total = sum(outcomes.values(), Outcome())
    for word, lines in (("FLAKY", total.flaky), ("FAILED", total.failed)):
        for line in lines:
            print(f"{word} {line}")
    print(f"== {'FAILED' if total.failed else 'passed'} after {total.seconds / 60:.1f} minutes")
    return int(bool(total.failed))


def machine() -> str:
    """Says which processor and versions these are."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    features = [name for name in SHOWN_FEATURES if name in fields.get("flags", "").split()]
    versions = []
    for package in ("tensorflow", "keras", "jax", "numpy"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    processor = fields.get("model name", "unknown processor")
    about = (f"{os.cpu_count()} cores of {processor} ({' '.join(features)})", *versions)
    return ", ".join((*about, f"Python {sys.version.split()[0]}"))


if __name__ == "__main__":
    sys.exit(main())
