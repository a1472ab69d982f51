"""A crowd at once, through a core in its own process: everybody ends exactly once and nothing stays
behind."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
from collections.abc import Iterator

import pytest
from test_async_llm import is_idle, params, with_core

CROWD, NUM_TOKENS = 2000, 8
PATIENCE_S = 120.0


@pytest.fixture
def few_files() -> Iterator[None]:
    """As `ulimit -n 256`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


async def crowd(llm, dice: random.Random) -> tuple[int, int]:
    """Sends all at once; half of them leave after a random number of tokens, a tenth read slowly. Returns how
    many were served to their end, and how many left."""
    leavers = set(dice.sample(range(CROWD), CROWD // 2))
    patience = {i: dice.randrange(NUM_TOKENS) for i in leavers}

    async def one(i: int) -> bool:
        tokens, num_ends = 0, 0
        if patience.get(i) == 0:
            task = asyncio.create_task(
                anext(llm.generate([1 + i % 200, 2, 3], params(max_tokens=NUM_TOKENS), str(i)))
            )
            await asyncio.sleep(dice.random())
            if not task.cancel():
                await task
            await asyncio.gather(task, return_exceptions=True)
            return False
        stream = llm.generate([1 + i % 200, 2, 3], params(max_tokens=NUM_TOKENS, ignore_eos=True), str(i))
        async for output in stream:
            tokens += len(output.outputs[0].token_ids)
            num_ends += output.finished
            if i in patience and tokens >= patience[i] and not output.finished:
                await stream.aclose()
                return False
            if i % 10 == 0:
                await asyncio.sleep(0.2)
        assert (tokens, num_ends) == (NUM_TOKENS, 1), f"request {i}"
        return True

    served = await asyncio.gather(*map(one, range(CROWD)))
    return sum(served), CROWD - sum(served)


@pytest.mark.slow
@pytest.mark.usefixtures("few_files")
def test_two_thousand_at_once_half_of_whom_leave():
    async def rounds() -> None:
        llm, _ = with_core(max_num_seqs=128)
        dice = random.Random(1)
        async with llm:
            await crowd(llm, dice)  # what is allocated once
            assert await is_idle(llm)
            gc.collect()
            before = resident_mib()
            for _ in range(2):
                served, left = await crowd(llm, dice)
                assert served >= CROWD // 2
                assert left > CROWD // 8
                assert await is_idle(llm), "blocks or requests stay in the core"
            gc.collect()
            assert resident_mib() < 1.1 * before

    asyncio.run(asyncio.wait_for(rounds(), PATIENCE_S))
