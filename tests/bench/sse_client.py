"""A client that costs little: streams of completions read by one thread, a JSON summary on stdout. Standard library.

    python sse_client.py PORT MAX_TOKENS PROMPTS.json

All streams start together. An event with text counts as the tokens it carried: events and tokens are made equal per
stream by its usage at the end.
"""

import json
import resource
import selectors
import socket
import sys
import time
from typing import Any

HOST = "127.0.0.1"
LIMIT_S = 300.0


class Stream:
    """One streamed completion."""

    def __init__(self, port: int, prompt: list[int], max_tokens: int) -> None:
        body = json.dumps(
            {
                "model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0,
                "ignore_eos": True, "stream_options": {"include_usage": True},
            }
        ).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        self.socket = socket.create_connection((HOST, port), timeout=LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(
            head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        self.socket.setblocking(False)
        self.times: list[float] = []
        """When each event with text came."""
        self._unread = b""
        self._last = b""

    def read(self) -> bool:
        """Take what is there; False once the server has closed."""
        part = self.socket.recv(1 << 16)
        now = time.perf_counter()
        *events, self._unread = (self._unread + part).split(b"\n\n")
        for event in events:
            if b'"text":"' in event and b'"text":""' not in event:
                self.times.append(now)
            elif b'"completion_tokens":' in event:
                self._last = event
        return bool(part)

    def tokens(self) -> int:
        """By the usage that the server states."""
        found = self._last.split(b'"completion_tokens":', 1)
        if len(found) != 2:
            raise ValueError(f"a stream ended without usage: {self._unread[:300]!r}")
        return int(found[1].split(b",", 1)[0].split(b"}", 1)[0])


def run(port: int, max_tokens: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Rate of all streams between the moment when all have begun and the first end."""
    selector, started = selectors.DefaultSelector(), time.perf_counter()
    streams = [Stream(port, prompt, max_tokens) for prompt in prompts]
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    open_streams = len(streams)
    while open_streams:
        for key, _ in selector.select(LIMIT_S):
            if not key.data.read():
                selector.unregister(key.data.socket)
                open_streams -= 1
    begun, ended = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    counted = [(s.tokens() / len(s.times), sum(begun < at <= ended for at in s.times)) for s in streams]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "tokens_per_s": sum(per_event * events for per_event, events in counted) / (ended - begun),
        "window_s": ended - begun,
        "first_s": begun - started,
        "events": sum(len(s.times) for s in streams),
        "tokens": sum(s.tokens() for s in streams),
        "client_cpu_s": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), json.load(open(sys.argv[3])))))  # noqa: SIM115 - ends here
