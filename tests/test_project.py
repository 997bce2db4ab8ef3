"""What is installed is what is in the checkout."""

import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = {"hesscore": "hesscore", "hesscore_cli": "cli"}


def names(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_every_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names(line for line in lines if line and not line.startswith("#"))
    assert names(requires("hess") or []) <= pinned


def test_the_wheel_holds_every_module(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(build, cwd=tmp_path, check=True)

    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    in_checkout = {
        (package / path.relative_to(ROOT / folder)).as_posix()
        for package, folder in ((Path(name), folder) for name, folder in PACKAGES.items())
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == in_checkout
