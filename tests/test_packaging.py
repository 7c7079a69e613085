"""What sites install with: every file is read by a parser of its language, and says what the project says."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {"torch": "pytorch"}


def needed(extra: str | None = None) -> dict[str, str]:
    rows = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {name.lower(): least for name, least in (row.split(">=") for row in rows)}


def test_spack_asks_for_what_the_project_needs() -> None:
    tree = ast.parse((PACKAGING / "spack/package.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [
        (call.func.id, call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.args and isinstance(call.args[0], ast.Constant)
    ]
    asked = {value for kind, value in named if kind == "depends_on"}
    for name, least in needed().items():
        assert any(re.fullmatch(rf"py-{name}@{re.escape(least)}:.*", str(each)) for each in asked), name
    assert {"slides", "calibrate", "tune", "log", "cuda"} == {value for kind, value in named if kind == "variant"}
    assert ("version", PROJECT["version"]) in named
    assert [node.name for node in tree.body if isinstance(node, ast.ClassDef)] == ["PyOutcore"]


def test_spack_s_recipe_has_spack_s_style() -> None:
    """`spack style` runs black, isort and flake8 on lines of 99 characters; ruff has the same rules."""
    recipe = str(PACKAGING / "spack/package.py")
    for words in (["format", "--check"], ["check", "--select", "E,F,W,I"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "--isolated", "--line-length", "99", recipe]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("left_with", "ends_with", "queued"), [(0, 0, False), (1, 1, False), (138, 0, True)])
def test_a_slurm_job_whose_time_is_up_goes_back_into_the_queue(
    left_with: int, ends_with: int, queued: bool, tmp_path: Path
) -> None:
    commands = {"srun": f'echo "srun $*"; exit {left_with}', "scontrol": 'echo "scontrol $*"'}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(PACKAGING / "slurm/train.sbatch"), "run.yaml", "train.epochs=2"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ends_with, done.stderr
    assert "outcore train run.yaml train.epochs=2" in done.stdout
    assert ("scontrol requeue 7" in done.stdout) is queued


def test_the_page_about_installing_names_every_extra_and_every_variant() -> None:
    page = (ROOT / "docs/how-to/install.md").read_text()
    extras = set(PROJECT["optional-dependencies"]) - {"test", "docs", "dev"}
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) == extras
    variants = re.findall(r'variant\("(\w+)"', (PACKAGING / "spack/package.py").read_text())
    assert f"with variants {', '.join(f'`{name}`' for name in variants)} " in page


def test_conda_asks_for_what_the_project_needs() -> None:
    recipe = yaml.safe_load((PACKAGING / "conda/recipe.yaml").read_text())
    run = dict(row.split(" >=") for row in recipe["requirements"]["run"])
    wanted = {NAMES.get(name, name): least for name, least in needed().items()}
    assert run == wanted | {"python": PROJECT["requires-python"].removeprefix(">=")}
    assert str(recipe["context"]["version"]) == PROJECT["version"]
    assert recipe["build"]["python"]["entry_points"] == ["outcore = outcore.cli.main:main"]


def test_the_citation_and_the_workflow_are_yaml_and_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["cff-version"] == "1.2.0" and citation["title"] and citation["authors"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    assert any("packaging/release.sh" in step for step in steps) and any("stamp.py" in step for step in steps)


@pytest.mark.parametrize("name", ["slurm/train.sbatch", "pbs/train.pbs", "release.sh"])
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(PACKAGING / name)], check=True)
    text = (PACKAGING / name).read_text()
    assert text.startswith("#!") and "set -euo pipefail" in text


def test_batch_scripts_start_one_process_for_each_gpu() -> None:
    slurm = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", (PACKAGING / "slurm/train.sbatch").read_text()))
    assert slurm["ntasks-per-node"] == slurm["gpus-per-node"] and slurm["signal"].startswith("SIGUSR1@")
    (chunk,) = re.findall(r"select=1:(\S+)", (PACKAGING / "pbs/train.pbs").read_text())
    select = dict(part.split("=") for part in chunk.split(":"))
    assert select["ngpus"] == select["mpiprocs"]


def test_the_dockerfile_is_of_known_instructions() -> None:
    text = re.sub(r"\\\n", " ", (PACKAGING / "docker/Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    words = [line.split()[0] for line in lines]
    assert set(words) <= {"FROM", "ARG", "COPY", "RUN", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"} and words[0] == "FROM"
    assert "constraints.txt" in text and 'ENTRYPOINT ["outcore"]' in text


def test_the_apptainer_definition_has_its_sections() -> None:
    text = (PACKAGING / "apptainer/outcore.def").read_text()
    assert re.search(r"^Bootstrap: docker\nFrom: \S+$", text, re.MULTILINE)
    sections = re.findall(r"^%(\w+)$", text, re.MULTILINE)
    assert sections == ["files", "post", "environment", "runscript", "test", "labels", "help"]
    assert f"Version {PROJECT['version']}" in text


def test_the_modulefile_closes_what_it_opens() -> None:
    text = (PACKAGING / "lmod/outcore.lua").read_text()
    code = re.sub(r"\[\[.*?\]\]", '""', re.sub(r"--.*", "", text), flags=re.DOTALL)
    assert len(re.findall(r"\b(?:if|function|do)\b", code)) == len(re.findall(r"\bend\b", code))
    assert code.count("(") == code.count(")") and code.count('"') % 2 == 0
    called = set(re.findall(r"^\s*(\w+)\(", code, re.MULTILINE))
    assert called <= {"help", "whatis", "conflict", "prepend_path", "setenv", "if"}
    if luac := shutil.which("luac"):
        subprocess.run([luac, "-p", str(PACKAGING / "lmod/outcore.lua")], check=True)


def test_a_release_is_stamped_into_every_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "packaging"
    shutil.copytree(PACKAGING, folder)
    archive = tmp_path / "outcore-1.2.3.tar.gz"
    archive.write_bytes(b"source")
    stamp: Any = runpy.run_path(str(PACKAGING / "stamp.py"))["stamp"]
    for _ in range(2):  # again over what was stamped before
        written = stamp(archive, folder)
    digest = "41cf6794ba4200b839c53531555f0f3998df4cbb01a4d5cb0b94e3ca5e23947d"
    assert f'version("1.2.3", sha256="{digest}")' in written["spack/package.py"]
    recipe = yaml.safe_load(written["conda/recipe.yaml"])
    assert recipe["source"]["sha256"] == digest and str(recipe["context"]["version"]) == "1.2.3"
    ast.parse(written["spack/package.py"])
    with pytest.raises(SystemExit, match="no source archive"):
        stamp(tmp_path / "other-1.0.zip", folder)
