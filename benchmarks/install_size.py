"""What `pip install .` puts on a disk: a fresh virtual environment, pip and setuptools not counted."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURE = "from mainspring.bench.startup import install_bytes; print(install_bytes())"


def install_bytes() -> int:
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
        return int(subprocess.run([python, "-c", MEASURE], stdout=subprocess.PIPE, check=True).stdout)


if __name__ == "__main__":
    print(f"{install_bytes() / 1e6:.0f} MB")
