# ruff: noqa: F403, F405
"""Spack recipe of outcore: copy it into a repository of yours as packages/py-outcore/package.py
(py_outcore in new ones).

`packaging/stamp.py` writes version and checksum of a release into it.
"""

from spack.package import *


class PyOutcore(PythonPackage):
    """Train networks that do not fit, and fill the GPU with the ones that do."""

    homepage = "https://pypi.org/project/outcore"
    pypi = "outcore/outcore-0.1.0.tar.gz"

    license("Apache-2.0", checked_by="the outcore authors")

    version("0.1.0")

    variant("slides", default=True, description="Read whole-slide images")
    variant("calibrate", default=True, description="Fit calibrations of a machine")
    variant("tune", default=False, description="Search settings with optuna")
    variant("log", default=False, description="Log to TensorBoard")
    variant("cuda", default=False, description="Train on NVIDIA GPUs")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")

    depends_on("py-torch@2.11: ~cuda", when="~cuda", type=("build", "run"))
    depends_on("py-torch@2.11: +cuda+distributed", when="+cuda", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-scipy@1.11:", type=("build", "run"))
    depends_on("py-typer@0.12:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-safetensors@0.4:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))

    with when("+slides"):
        depends_on("openslide", type="run")
        depends_on("py-openslide-python@1.4:", type=("build", "run"))
        depends_on("py-tifffile@2025.1:", type=("build", "run"))
        depends_on("py-imagecodecs@2025.3:", type=("build", "run"))
        depends_on("py-zarr@3.0:", type=("build", "run"))
        depends_on("py-pillow@10.0:", type=("build", "run"))
    with when("+calibrate"):
        depends_on("py-scikit-learn@1.4:", type=("build", "run"))
        depends_on("py-threadpoolctl@3.1:", type=("build", "run"))
    depends_on("py-optuna@4.0:", when="+tune", type=("build", "run"))
    depends_on("py-tensorboard@2.17:", when="+log", type=("build", "run"))
