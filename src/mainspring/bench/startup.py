"""What a person waits for, and what an install takes: import, first token, bytes on disk.

Each measurement is a fresh process, timed from outside like a person would, after one that is not counted:
the files are in the system's cache then, as they are on the second run of a day.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time"
NOT_COUNTED = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")


def measure(repeats: int, model: str, kernels: str) -> dict[str, Any]:
    return {
        "model": model,
        "kernels": kernels,
        "repeats": repeats,
        "import_s": round(median_of(repeats, import_s), 3),
        "first_token_s": round(median_of(repeats, lambda: first_token_s(model, kernels)), 2),
        "install_bytes": install_bytes(),
    }


def median_of(repeats: int, measurement: Callable[[], float]) -> float:
    measurement()  # not counted
    return statistics.median(measurement() for _ in range(repeats))


def import_s() -> float:
    """Seconds of `import mainspring` in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import mainspring; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


def first_token_s(model: str, kernels: str) -> float:
    """Seconds from starting `mainspring generate` to the first byte of its answer."""
    command = [sys.executable, "-m", "mainspring", "generate", "--model", model, "--kernels", kernels]
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "4"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode:
        raise RuntimeError(f"{' '.join(command)} said nothing, exit status {process.returncode}")
    return seconds


def install_bytes() -> int | None:
    """Bytes of everything in this virtual environment's site-packages but pip and setuptools; None outside of
    one, and where development tools are in it, for then the figure would say nothing of what a user installs.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    if sys.prefix == sys.base_prefix or (site / "pytest").exists():
        return None
    return sum(
        file.stat().st_size
        for entry in site.iterdir()
        if entry.name.split("-")[0] not in NOT_COUNTED and entry.name not in NOT_COUNTED
        for file in ([entry] if entry.is_file() else entry.rglob("*"))
        if file.is_file()
    )


def table(figures: dict[str, Any]) -> str:
    """For people."""
    size = figures["install_bytes"]
    installed = "not measured: no user's venv" if size is None else f"{size / 1e6:.0f} MB"
    return "\n".join(
        [
            f"{'import mainspring':<34} {figures['import_s']:.3f} s",
            f"{'mainspring generate, first token':<34} {figures['first_token_s']:.2f} s ({figures['model']})",
            f"{'installed size':<34} {installed}",
        ]
    )
