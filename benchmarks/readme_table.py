"""Measures every figure of the README on this machine and rewrites its table. Takes a few minutes."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from install_size import install_bytes

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: begin", "<!-- figures: end -->"


def bench(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mainspring", "bench", name, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def table() -> str:
    startup, throughput, scheduler = bench("startup"), bench("throughput"), bench("scheduler")
    rates = throughput["tokens_per_s"]
    by_count = scheduler["us_per_request_step"]
    rows = [
        ("prompt of 512 tokens", f"{rates['prefill_512']:.0f} tokens/s"),
        ("one answer at a time", f"{rates['decode_1']:.0f} tokens/s"),
        ("32 answers at once, prompts of 32", f"{rates['decode_32x32+64']:.0f} tokens/s"),
        ("32 answers at once, prompts of 512", f"{rates['decode_32x512+32']:.0f} tokens/s"),
        ("peak memory of these", f"{throughput['peak_memory_bytes'] / 2**30:.2f} GiB"),
        ("`mainspring generate` to its first token", f"{startup['first_token_s']:.1f} s"),
        ("`import mainspring`", f"{startup['import_s'] * 1000:.0f} ms"),
        ("installed, with everything it needs", f"{install_bytes() / 1e6:.0f} MB"),
        (
            "scheduler, per running request and step (256, 1024)",
            f"{by_count['256']} us, {by_count['1024']} us",
        ),
        (
            "scheduler, 4,000 waiting requests add to a step",
            f"{scheduler['us_added_by_4000_waiting']:.0f} us",
        ),
    ]
    machine = (
        f"{startup['model']} on {len(os.sched_getaffinity(0))} cores of {cpu()}, kernels "
        f"{throughput['kernels']}, where numpy's matrix product reaches "
        f"{throughput['sgemm_gflops']:.0f} GFLOP/s."
    )
    lines = [machine, "", "| | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows)]
    return "\n".join(lines)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    marker_end, rest = rest.split("-->", 1)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}{marker_end}-->\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
