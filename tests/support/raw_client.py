"""A bare HTTP client that can hang up at any moment: what a browser tab or a killed script does."""

import json
import socket
from collections.abc import Iterator
from typing import Any


class RawStream:
    """One streamed completion over its own connection."""

    def __init__(self, port: int, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> None:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._sock.sendall(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self._buffer = b""

    def events(self) -> Iterator[str]:
        """The data of each SSE event as it arrives; ends when the server closes or after [DONE]."""
        while True:
            while b"\n\n" in self._buffer:
                block, self._buffer = self._buffer.split(b"\n\n", 1)
                for line in block.splitlines():
                    if line.startswith(b"data: "):
                        yield line[6:].decode()
                        if line == b"data: [DONE]":
                            return
            part = self._sock.recv(65536)
            if not part:
                return
            self._buffer += part

    def read_all(self) -> bytes:
        """Everything until the server closes."""
        while part := self._sock.recv(65536):
            self._buffer += part
        return self._buffer

    def hang_up(self) -> None:
        """Closes at once; what the server still sends is answered by a reset."""
        self._sock.close()
