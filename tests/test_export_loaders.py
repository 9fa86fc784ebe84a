"""SavedModels are read by the loaders of older TensorFlows, which servers in the field run."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exported import LABELS, served_model

from keras_vit.exporting import VerificationError, artefacts, rebuild, samples, verification
from keras_vit.exporting.clean import messages

pytestmark = pytest.mark.full

VERSIONS = ("2.18.1", "2.20.0")
LIBRARIES = ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2")


def library(version: str, folder: Path) -> Path:
    """The C++ libraries of a TensorFlow wheel, from KERAS_VIT_WHEELS or the package registry."""
    wheels = Path(os.environ.get("KERAS_VIT_WHEELS", folder))
    if not list(wheels.glob(f"tensorflow_cpu-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(wheels), f"tensorflow-cpu=={version}"]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(f"tensorflow_cpu-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            archive.extract(f"tensorflow/{name}", folder)
    return folder / "tensorflow"


@pytest.fixture(scope="module")
def request_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path | None], messages.Request]:
    """Makes the checks of an exported hybrid for any loader."""
    model = served_model(resnet_layers=(1, 1), patch_size=1)
    directory = tmp_path_factory.mktemp("loaders") / "pets"
    artefacts.export(model, directory, labels=LABELS, verify=False)
    exportable = rebuild.rebuild(model)
    expected = samples.make_references(exportable)

    def make(library: Path | None) -> messages.Request:
        return messages.Request(
            format="savedmodel",
            path=directory / "1",
            parameter_bytes=exportable.parameter_bytes,
            batch_sizes=samples.BATCH_SIZES,
            labels=LABELS,
            cases=verification.savedmodel_cases(exportable, expected, top_k=5),
            library=library,
        )

    return make


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_loader_reads_the_model(
    version: str, request_of: Callable[[Path | None], messages.Request], tmp_path: Path
) -> None:
    """Every signature, JPEG, PNG and BMP included, answers the same to 1e-4; warm-up replays."""
    report = verification.run_checks(request_of(library(version, tmp_path)))
    verification.require(report.checks, artefact="savedmodel")
    assert report.runtime == {"loader": f"TensorFlow C++ {version}"}
    differences = [check.measured for check in report.checks if "difference" in check.name]
    print(version, max(differences))
    assert np.max(differences) <= 1e-4


def test_a_folder_without_a_library_is_told(
    request_of: Callable[[Path | None], messages.Request], tmp_path: Path
) -> None:
    """A wrong folder of libraries is an error that names it."""
    with pytest.raises(VerificationError, match="There is no libtensorflow_cc"):
        verification.run_checks(request_of(tmp_path))
