"""The exchange with one client: whoever carries its messages may die in any way."""

import asyncio

import pytest

from router.exchange import Exchange

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


@pytest.mark.parametrize("fault", [RuntimeError("the proxy is gone"), ConnectionError(), KeyError("type")])
def test_a_dead_carrier_is_a_client_that_hung_up(fault: Exception) -> None:
    async def receive() -> dict[str, object]:
        raise fault

    async def send(message: object) -> None:
        raise AssertionError("nothing is sent")

    asyncio.run(asyncio.wait_for(Exchange(SCOPE, receive, send, 60.0).wait_gone(), 1.0))
