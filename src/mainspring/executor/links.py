"""Socket pairs between ranks, made by whoever starts their processes and inherited by these."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import combinations


class Link:
    """One end of a pair. Who made it closes it once the process that inherits it runs: an end that is kept
    open would hide the process's end from its peer."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.descriptor = end.fileno()

    def close(self) -> None:
        self._end.close()


def make_links(num_ranks: int) -> list[dict[int, Link]]:
    """For each rank a link to each other."""
    links: list[dict[int, Link]] = [{} for _ in range(num_ranks)]
    for one, other in combinations(range(num_ranks), 2):
        ends = socket.socketpair()
        links[one][other], links[other][one] = map(Link, ends)
    return links


def close_links(links: Sequence[dict[int, Link]]) -> None:
    for by_rank in links:
        for link in by_rank.values():
            link.close()
