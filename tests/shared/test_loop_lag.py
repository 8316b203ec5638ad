import asyncio
import time

from shared.loop_lag import watch_loop_lag


async def test_what_blocks_the_loop_is_seen_as_lag():
    lags: list[float] = []
    watching = asyncio.create_task(watch_loop_lag(lags.append, interval_s=0.01))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - what is to be seen
    while not lags:  # noqa: ASYNC110 - the watch tells nobody else
        await asyncio.sleep(0.01)
    watching.cancel()
    assert max(lags) > 0.1
    assert min(lags) >= 0
