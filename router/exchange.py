"""One HTTP exchange over raw ASGI: a bounded body in, JSON or an event stream out, and the moment the client goes away.

Knows bytes, headers and deadlines of sockets. Knows no OpenAI field.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from router.errors import ApiError, RouterError
from router.openai import sse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
MAX_DISCARD_BYTES = 64 << 20
"""A refused body is read and dropped up to here, so that the client can read the answer instead of a reset."""


class ClientGone(RouterError):
    """The client hung up, or its socket took nothing for too long (`is_slow`)."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__("slow client" if is_slow else "client disconnected")
        self.is_slow = is_slow


class Exchange:
    """Used by one task; `wait_gone` may run in another once the body is read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, slow_client_s: float) -> None:
        self._receive, self._send, self._slow_client_s = receive, send, slow_client_s
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[Header] = list(scope["headers"])
        self.status = 0
        """What was answered; 0 = nothing yet."""
        self.is_ended = False
        """The last byte of the answer was handed over: a disconnect means nothing any more."""

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._headers if key.lower() == name), None)

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The body. Raises `ApiError` 413 without holding more than `max_bytes`, 408 past `timeout_s`; `ClientGone`."""
        declared = self.header(b"content-length") or b"0"
        is_over = declared.isdigit() and int(declared[:20]) > max_bytes
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while size <= MAX_DISCARD_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone(is_slow=False)
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    is_over = is_over or size > max_bytes
                    parts = [] if is_over else [*parts, part]
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if not is_over:
                raise ApiError("body_timeout", f"The body did not arrive within {timeout_s:g} s.") from None
        if is_over:
            raise ApiError("body_too_large", f"The body is over the limit of {max_bytes} bytes.")
        return b"".join(parts)

    async def wait_gone(self) -> None:
        """Returns when the client has hung up, or when whoever carries its messages has died. Cancel-safe."""
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception:  # noqa: BLE001  # a proxy that died raises what it likes; nobody listens any more
            return

    async def send_json(self, status: int, document: object, headers: Iterable[Header] = ()) -> None:
        body = sse.encode_json(document) + b"\n"
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._put({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def send_error(self, error: ApiError) -> None:
        """A JSON answer, or an error event and the end of the stream where one was begun; never [DONE]."""
        if self.status:
            await self.send_events(sse.encode_event(error.body()), is_last=True)
        else:
            await self.send_json(error.status, error.body(), error.headers())

    async def send_events(self, events: bytes, is_last: bool = False) -> None:
        """Begins the event stream with the first call. Waits for the socket. Raises `ClientGone`."""
        if not self.status:
            await self._start(200, list(sse.HEADERS))
        await self._put({"type": "http.response.body", "body": events, "more_body": not is_last})

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        self.is_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        try:
            async with asyncio.timeout(self._slow_client_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone(is_slow=True) from None
        except OSError:
            raise ClientGone(is_slow=False) from None
