"""Time that passes when a test says so."""

from __future__ import annotations


class FakeClock:
    """Fits `base.protocols.Clock`. Each reading moves it on by `step_s`, so that moments differ where a test
    needs that.
    """

    def __init__(self, now_s: float = 0.0, step_s: float = 0.0) -> None:
        self.now_s = now_s
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
