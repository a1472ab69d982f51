"""How late an event loop is: a task that sleeps a little, over and over, and looks how much longer it took.

Whatever holds the loop up (a long computation, a large message) makes every stream on it late by as much.
While there is nothing to do the probe looks seldom and counts nothing, so that an idle process stays idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mainspring.base.protocols import Clock
from mainspring.frontend.stats import Histogram

INTERVAL_S = 0.02
IDLE_INTERVAL_S = 0.5
DELAY_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)


class LoopProbe:
    """`delay_s` has one observation for each `INTERVAL_S` of the time in which `is_busy`."""

    def __init__(self, is_busy: Callable[[], bool] = lambda: True, clock: Clock = time.monotonic) -> None:
        self.delay_s = Histogram.of(DELAY_S)
        self._is_busy = is_busy
        self._clock = clock

    async def run(self) -> None:
        """On the loop that is to be watched, until it is cancelled."""
        while True:
            is_busy = self._is_busy()
            pause_s = INTERVAL_S if is_busy else IDLE_INTERVAL_S
            due_s = self._clock() + pause_s
            await asyncio.sleep(pause_s)
            if is_busy:
                self.delay_s.observe(max(0.0, self._clock() - due_s))
