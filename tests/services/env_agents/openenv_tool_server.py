"""A server of OpenEnv's own package for tests: a shop of MCP tools. It writes each session's end to standard output."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment


class Opening(Observation):
    text: str


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.sold = 0

        @server.tool
        def buy(item: str, count: int = 1) -> str:
            """Buys something."""
            self.sold += count
            return f"{count} {item}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Opening:
        return Opening(text="the shop is open")

    async def step_async(self, action: Action, timeout_s: float | None = None, **keywords: Any) -> Observation:
        observation = await super().step_async(action, timeout_s, **keywords)
        if self.sold >= 3:
            observation.reward, observation.done = 1.0, True
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Opening(text="only tools")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Shop, Action, Observation, env_name="shop", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
