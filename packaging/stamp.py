"""Write a release's version and checksum into the recipes.

    python packaging/stamp.py dist/outcore-0.1.0.tar.gz

Spack and conda fetch the source archive and compare its checksum, which is only known once it is built. The version of
the package itself is that of `pyproject.toml`; nothing else is written by hand.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
URL = "https://pypi.org/packages/source/o/outcore/outcore-${{ version }}.tar.gz"


def stamp(archive: Path, folder: Path = HERE) -> dict[str, str]:
    """Bring all recipes up to a source archive; returns what was written, by file."""
    found = re.fullmatch(r"outcore-(\d+(?:\.\w+)+)\.tar\.gz", archive.name)
    if found is None:
        raise SystemExit(f"{archive.name} is no source archive of outcore; give dist/outcore-0.1.0.tar.gz")
    version, digest = found[1], hashlib.sha256(archive.read_bytes()).hexdigest()
    changes = {
        "spack/package.py": (
            (r'version\("[^"]+"(?:, sha256="\w+")?\)', f'version("{version}", sha256="{digest}")'),
            (r"outcore/outcore-[\w.]+\.tar\.gz", f"outcore/outcore-{version}.tar.gz"),
        ),
        "conda/recipe.yaml": (
            (r"version: \d[\w.]*", f"version: {version}"),
            (r"source:\n(?:  \w+: .*\n)+", f"source:\n  url: {URL}\n  sha256: {digest}\n"),
        ),
        "apptainer/outcore.def": ((r"Version \d[\w.]*", f"Version {version}"),),
        "lmod/outcore.lua": ((r"outcore/\d[\w.]*\.lua", f"outcore/{version}.lua"),),
    }
    written = {}
    for name, replacements in changes.items():
        text = (folder / name).read_text()
        for pattern, new in replacements:
            text, count = re.subn(pattern, lambda _, new=new: new, text)
            if not count:
                raise SystemExit(f"{name} has no {pattern}")
        (folder / name).write_text(text)
        written[name] = text
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print("\n".join(stamp(Path(sys.argv[1]))))
