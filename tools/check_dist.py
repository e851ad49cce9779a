#!/usr/bin/env python3
"""Installs what `make dist` has built, in an environment of its own and without extras, and runs the demo's core in it.

    python tools/check_dist.py dist

The wheel is installed with the versions of constraints.txt. Tools come from the sdist, out of which the package itself
is taken away, so that what runs is what was installed. Exit code 0 if all of it works; 1 with the step that did not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("matplotlib", "ray", "pytest", "sphinx")  # what only extras bring


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder with one sdist and one wheel")
    args = parser.parse_args(argv)
    (wheel,) = args.dist.glob("*.whl")
    (sdist,) = args.dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            check(wheel.resolve(), sdist, Path(temporary))
        except subprocess.CalledProcessError as error:
            print(f"check_dist: {error}", file=sys.stderr)
            return 1
    print(f"check_dist: {wheel.name} and {sdist.name} are whole")
    return 0


def check(wheel: Path, sdist: Path, work: Path) -> None:
    """Install, look, load."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "sdist", filter="data")
    (source,) = (work / "sdist").iterdir()
    shutil.rmtree(source / "metashard")
    venv.create(work / "env", with_pip=True)
    python = work / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["OMP_NUM_THREADS"] = "1"

    def run(*words: str | Path) -> None:
        subprocess.run([str(word) for word in words], cwd=work, env=environment, check=True)

    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    run(python, "-m", "pip", "check")
    absent = f"import importlib.util as u; assert not [n for n in {EXTRAS} if u.find_spec(n)], 'an extra is here'"
    run(python, "-c", absent)
    run(python, source / "tools" / "make_checkpoint.py", work / "model", "--family", "sd3-small", "--layers", "1")
    run(python, source / "tools" / "demo.py", "--model", work / "model", "--nproc", "2", "--cpu")
    run(python.with_name("metashard"), "plan", work / "model", "--component", "transformer", "--world-size", "8")


if __name__ == "__main__":
    sys.exit(main())
