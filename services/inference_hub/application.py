"""The ASGI application: generate calls go straight to the hot path, everything else to FastAPI."""

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse
from fastapi_offline import FastAPIOffline

from services.inference_hub import control, documentation, refusals
from services.inference_hub.generate import AUTHORIZATION_HEADER, Receive, Scope, Send, refused_access, send_reply
from services.inference_hub.generate_operation import GENERATE_PATH
from services.inference_hub.hub import Hub
from shared.release import VERSION


class Application:
    """The hub as an ASGI application. Its life is `hub.open_hub`'s, so it answers no lifespan messages."""

    def __init__(self, hub: Hub) -> None:
        self._generate = hub.generate
        self._access = hub.access
        self._control = control_plane(hub)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == GENERATE_PATH and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        elif self._access.may_request(scope["path"], dict(scope["headers"]).get(AUTHORIZATION_HEADER)):
            await self._control(scope, receive, send)  # type: ignore[arg-type]
        else:
            await send_reply(send, refused_access(is_generate=False))


def control_plane(hub: Hub) -> FastAPI:
    application = FastAPIOffline(
        title="Headrace inference hub", version=VERSION, description=documentation.DESCRIPTION, redoc_url=None
    )

    @application.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")

    application.include_router(control.engine_routes(hub))
    application.include_router(control.weight_routes(hub))
    application.include_router(control.health_routes(hub))
    refusals.install(application)
    documentation.install(application)
    return application
