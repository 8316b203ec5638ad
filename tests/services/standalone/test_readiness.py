from aiohttp import web

from services.standalone.ports import LOOPBACK, free_ports
from services.standalone.readiness import answers, redis_answers, wait_until


async def test_nothing_that_listens_is_not_ready():
    (port,) = free_ports(1)
    assert not await answers(f"http://{LOOPBACK}:{port}/health")()
    assert not await redis_answers(f"redis://{LOOPBACK}:{port}/0")()


async def test_service_is_ready_when_it_answers_200():
    statuses = iter([503, 503, 200])
    asked = []

    async def health(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=next(statuses))

    application = web.Application()
    application.router.add_get("/health", health)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    try:
        url = f"http://{LOOPBACK}:{runner.addresses[0][1]}/health"
        assert await wait_until(answers(url), timeout_s=60)
    finally:
        await runner.cleanup()
    assert len(asked) == 3


async def test_redis_is_ready_when_it_answers(redis_url):
    assert await redis_answers(redis_url)()


async def test_waiting_ends_at_the_deadline():
    async def never() -> bool:
        return False

    assert not await wait_until(never, timeout_s=0)
