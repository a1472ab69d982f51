"""What a step costs beyond its work, where each worker is a process.

`python benchmarks/executor_cost.py [--json]`. A plan is encoded once, sent to every rank and decoded there,
and one rank answers; the ranks do nothing else. Microseconds, first deciles: a median would say how much else
the machine has to do. "there and back" is from the plan to its result, with everything in it.

Beside it, what a ring of shared memory would take in the place of sending: a copy. Somebody has to wake the
readers in either case, and a byte on a socket costs what the whole plan does.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from mainspring.base.messages import BlockAppend, ModelRunnerOutput, SchedulerOutput
from mainspring.worker.proc import Execute, decode_answer, decode_order, decode_result, encode

ROWS, RANKS = (1, 64, 256), (1, 2, 4)
BLOCK_SIZE = 16
NUM_STEPS, NUM_WARM = 400, 50
WORKER = """
import sys
from multiprocessing.connection import Connection
import msgspec
from mainspring.worker.proc import Done, decode_order, encode
from mainspring.base.messages import ModelRunnerOutput
orders, answers = Connection(int(sys.argv[1])), sys.argv[2] == "answers"
try:
    while True:
        order = decode_order(orders.recv_bytes())
        if answers:
            result = ModelRunnerOutput([[7]] * order.plan.num_rows)
            orders.send_bytes(encode(Done(msgspec.Raw(encode(result)))))
except EOFError:
    pass
"""


def plan_of(num_rows: int) -> SchedulerOutput:
    """Of requests that decode: every sixteenth gets a block."""
    appends = [BlockAppend(slot, 0, [1000 + slot]) for slot in range(0, num_rows, BLOCK_SIZE)]
    rows = list(range(num_rows))
    return SchedulerOutput(12345, rows, [1] * num_rows, rows, num_rows, new_blocks=appends)


def first_decile(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def time_us(run: Callable[[], object]) -> float:
    times = []
    for step in range(NUM_WARM + NUM_STEPS):
        began_s = time.perf_counter()
        run()
        if step >= NUM_WARM:
            times.append(time.perf_counter() - began_s)
    return 1e6 * first_decile(times)


class Ranks:
    """Processes that decode plans; the last one answers."""

    def __init__(self, num_ranks: int) -> None:
        self._processes, self._orders = [], []
        for rank in range(num_ranks):
            ours, theirs = socket.socketpair()
            role = "answers" if rank == num_ranks - 1 else "is silent"
            command = [sys.executable, "-c", WORKER, str(theirs.fileno()), role]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            theirs.close()
            self._orders.append(Connection(ours.detach()))

    def step(self, body: bytes) -> float:
        """Seconds that sending took."""
        began_s = time.perf_counter()
        for orders in self._orders:
            orders.send_bytes(body)
        sent_s = time.perf_counter() - began_s
        answer = decode_answer(self._orders[-1].recv_bytes())
        decode_result(answer.result, ModelRunnerOutput | None)  # type: ignore[union-attr]
        return sent_s

    def close(self) -> None:
        for orders in self._orders:
            orders.close()
        for process in self._processes:
            process.wait()


def measure(num_rows: int, num_ranks: int) -> dict[str, float]:
    order = Execute(plan_of(num_rows))
    body = encode(order)
    ranks = Ranks(num_ranks)
    sent_us: list[float] = []
    try:
        there_and_back_us = time_us(lambda: sent_us.append(1e6 * ranks.step(encode(order))))
    finally:
        ranks.close()
    with mmap.mmap(-1, 1 << 20) as ring:
        ring_us = time_us(lambda: ring.__setitem__(slice(0, len(body)), body))
    return {
        "rows": num_rows,
        "ranks": num_ranks,
        "bytes": len(body),
        "encode": time_us(lambda: encode(order)),
        "send": first_decile(sent_us[NUM_WARM:]),
        "decode": time_us(lambda: decode_order(body)),
        "there and back": there_and_back_us,
        "a copy into a ring": ring_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print as JSON")
    as_json = parser.parse_args().json
    found = [measure(num_rows, num_ranks) for num_rows in ROWS for num_ranks in RANKS]
    if as_json:
        print(json.dumps(found))
        return
    print("".join(f"{name:>20}" for name in found[0]))
    for line in found:
        print(
            "".join(
                f"{value:20.1f}" if isinstance(value, float) else f"{value:20d}" for value in line.values()
            )
        )


if __name__ == "__main__":
    main()
