"""A grammar that follows the whole output, and a compiler that takes as long as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import EngineCoreRequest
from mainspring.base.protocols import Grammar
from mainspring.testing.fake_model import WORD_BITS, mix


class FakeGrammar:
    """Fits `base.protocols.Grammar`. What may come next is a hash of everything accepted so far, so a token
    that is fed twice, late or not at all changes the rest.

    About one token in four is allowed, never none. It is finished by the EOS token, where it has one and
    where EOS is allowed, or after `length` tokens; then only EOS may follow.
    """

    def __init__(self, vocab_size: int, eos_token_id: int | None, length: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._length = length
        self._states = [mix(seed, vocab_size)]
        self._ended = False

    def _allows(self, token_id: int) -> bool:
        if self.is_finished():
            return token_id == self._eos
        state = self._states[-1]
        return mix(state, token_id) & 3 == 0 or token_id == self._always(state)

    def _always(self, state: int) -> int:
        """One token that is not EOS is allowed whatever the hash says."""
        token_id = state % self._vocab_size
        return token_id if token_id != self._eos else (token_id + 1) % self._vocab_size

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        bits = np.zeros(len(row) * WORD_BITS, dtype=np.uint8)
        bits[: self._vocab_size] = [self._allows(token_id) for token_id in range(self._vocab_size)]
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self._ended = token_id == self._eos
        self._states.append(mix(self._states[-1], token_id))
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens < len(self._states), "a rollback beyond the beginning"
        if num_tokens:
            del self._states[-num_tokens:]
            self._ended = False

    def is_finished(self) -> bool:
        return self._ended or len(self._states) > self._length


class FakeGrammarCompiler:
    """Fits `base.protocols.GrammarCompiler`.

    `make` gives the matcher of a request, `ticks` the number of `tick()`s until it is ready (default 0: at
    once), and `failing` the requests whose compilation ends with an error instead.
    """

    def __init__(
        self,
        make: Callable[[EngineCoreRequest], Grammar],
        ticks: Mapping[str, int] | None = None,
        failing: frozenset[str] = frozenset(),
    ) -> None:
        self._make = make
        self._ticks = dict(ticks or {})
        self._failing = failing
        self._running: list[tuple[int, EngineCoreRequest, Future[Grammar]]] = []
        self._now = 0
        self.closed = False

    def compile(self, request: EngineCoreRequest) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self._running.append((self._now + self._ticks.get(request.request_id, 0), request, future))
        self._finish_due()
        return future

    def prepare(self) -> Future[bool]:
        prepared: Future[bool] = Future()
        prepared.set_result(True)
        return prepared

    def tick(self) -> None:
        """Time passes for everything that is being compiled."""
        self._now += 1
        self._finish_due()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        self.closed = True

    def _finish_due(self) -> None:
        due = [entry for entry in self._running if entry[0] <= self._now]
        self._running = [entry for entry in self._running if entry[0] > self._now]
        for _, request, future in due:
            if future.cancelled():
                continue
            if request.request_id in self._failing:
                future.set_exception(ValueError(f"no grammar for {request.request_id}: planned failure"))
            else:
                future.set_result(self._make(request))
