"""Handshake and MAC: pure, step by step, and once over real sockets of each kind."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer import wire
from kv_transfer.errors import DeadlineExceeded, FrameInvalid, HandshakeFailed, PeerLost, PeerRefused, TransferError
from kv_transfer.wire import KeyRing, client_steps, listen_steps, server_steps

OTHER = KeyRing((("k1", b"2" * 32),))
Tamper = Callable[[int, bytes], bytes]


def accept(_: bytes) -> None:
    return None


def shake(client: wire.Steps, server: wire.Steps, tamper: Tamper = lambda _, frame: frame):
    """Runs both generators against each other; `tamper(n, payload)` sees each frame. Returns both outcomes or
    raises."""
    outcomes: dict[str, wire.Established] = {}

    def advance(name: str, steps: wire.Steps, payload: bytes | None, start: bool = False) -> list[bytes]:
        sent: list[bytes] = []
        try:
            value = next(steps) if start else steps.send(payload)  # type: ignore[arg-type]
            while value is not None:
                sent.append(value)
                value = next(steps)
        except StopIteration as done:
            outcomes[name] = done.value
        return sent

    advance("server", server, None, start=True)
    to_server, count = advance("client", client, None, start=True), 0
    while to_server:
        to_client: list[bytes] = []
        for frame in to_server:
            to_client += advance("server", server, tamper(count, frame[4:]))
            count += 1
        to_server = []
        for frame in to_client:
            to_server += advance("client", client, tamper(count, frame[4:]))
            count += 1
    return outcomes["client"], outcomes["server"]


def test_both_ends_agree_and_frames_flow_both_ways(ring):
    client, server = shake(client_steps(ring, "front", b"cb", accept), server_steps(ring, "front", b"sb", accept))
    assert (client.peer_body, server.peer_body, server.plane) == (b"sb", b"cb", "front")
    for sender, receiver in ((client, server), (server, client)):
        for payload in (b"one", b"", b"two"):
            assert receiver.incoming.open(sender.outgoing.frame(payload)[4:]) == payload


def test_two_sessions_have_different_keys(ring):
    first, _ = shake(client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", accept))
    _, second = shake(client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", accept))
    with pytest.raises(FrameInvalid):
        second.incoming.open(first.outgoing.frame(b"x")[4:])


def test_a_client_without_the_secret_learns_that_the_server_is_not_its_own(ring):
    with pytest.raises(HandshakeFailed, match="server does not hold"):
        shake(client_steps(OTHER, "front", b"", accept), server_steps(ring, "front", b"", accept))


def test_a_client_that_cannot_prove_the_secret_is_refused(ring):
    def forge(count: int, payload: bytes) -> bytes:
        if count != 2:
            return payload
        return bytes(wire._HANDSHAKE.encode(wire.Proof(b"f" * 32)))

    with pytest.raises(HandshakeFailed, match="client does not hold"):
        shake(client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", accept), forge)


def test_nothing_of_the_body_is_checked_before_authentication(ring):
    seen: list[bytes] = []

    def check(body: bytes) -> None:
        seen.append(body)

    with pytest.raises(HandshakeFailed):
        shake(client_steps(OTHER, "front", b"evil", check), server_steps(ring, "front", b"evil", check))
    assert seen == []


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_any_flipped_byte_in_any_frame_fails_the_handshake(ring, count: int):
    for position in (-1, -20, 9):

        def flip(n: int, payload: bytes, position: int = position) -> bytes:
            damaged = bytearray(payload)
            if n == count:
                damaged[position % len(damaged)] ^= 1
            return bytes(damaged)

        with pytest.raises(TransferError):
            shake(client_steps(ring, "front", b"c" * 40, accept), server_steps(ring, "front", b"s" * 40, accept), flip)


def test_a_replayed_client_is_refused(ring):
    recorded: list[bytes] = []

    def record(_: int, payload: bytes) -> bytes:
        recorded.append(payload)
        return payload

    shake(client_steps(ring, "front", b"c", accept), server_steps(ring, "front", b"s", accept), record)
    hello, _, proof, _ = recorded
    server = server_steps(ring, "front", b"s", accept)
    next(server)
    server.send(hello)
    next(server)
    with pytest.raises(HandshakeFailed):
        server.send(proof)


def test_a_replayed_reordered_or_dropped_frame_is_refused(ring):
    for accepted, refused in (([0], 0), ([], 1), ([0, 1], 0), ([0, 1], 1)):
        client, server = shake(client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", accept))
        frames = [client.outgoing.frame(p)[4:] for p in (b"first", b"second")]
        for index in accepted:
            server.incoming.open(frames[index])
        with pytest.raises(FrameInvalid):
            server.incoming.open(frames[refused])


def test_a_frame_sent_back_to_its_sender_is_refused(ring):
    client, _ = shake(client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", accept))
    with pytest.raises(FrameInvalid):
        client.incoming.open(client.outgoing.frame(b"x")[4:])


def test_another_plane_or_major_is_refused(ring, monkeypatch):
    with pytest.raises(HandshakeFailed, match="plane"):
        shake(client_steps(ring, "lane", b"", accept), server_steps(ring, "front", b"", accept))
    client = client_steps(ring, "front", b"", accept)
    frame = next(client)
    assert frame is not None
    monkeypatch.setattr(wire, "PROTOCOL_MAJOR", 2)
    server = server_steps(ring, "front", b"", accept)
    next(server)
    assert b"wrong_protocol" in (server.send(frame[4:]) or b"")


def test_a_listener_of_two_planes_checks_each_with_its_own_function(ring):
    checks = {
        "session": lambda body: None if body == b"s" else "no",
        "lane": lambda body: None if body == b"l" else "no",
    }
    for plane, body in (("session", b"s"), ("lane", b"l")):
        _, server = shake(client_steps(ring, plane, body, accept), listen_steps(ring, b"", checks))
        assert server.plane == plane
        with pytest.raises(HandshakeFailed):
            shake(client_steps(ring, plane, b"x", accept), listen_steps(ring, b"", checks))


def test_an_authenticated_client_hears_why_it_is_refused(ring):
    client, server = client_steps(ring, "front", b"", accept), server_steps(ring, "front", b"", lambda _: "too_old")
    hello = next(client)
    next(server)
    challenge = server.send(hello[4:])
    next(server)
    client.send(None)
    proof = client.send(challenge[4:])
    refusal = server.send(proof[4:])
    client.send(None)
    with pytest.raises(PeerRefused) as refused:
        client.send(refusal[4:])
    assert refused.value.code == "too_old"
    with pytest.raises(HandshakeFailed):
        next(server)


def test_rotation_accepts_both_keys_and_dials_with_the_first():
    old, new = ("k1", b"1" * 32), ("k2", b"2" * 32)
    both = KeyRing((new, old))
    for ring in (KeyRing((old,)), KeyRing((new,)), both):
        shake(client_steps(ring, "front", b"", accept), server_steps(both, "front", b"", accept))
    with pytest.raises(HandshakeFailed, match="unknown key id"):
        shake(client_steps(both, "front", b"", accept), server_steps(KeyRing((old,)), "front", b"", accept))


def test_the_secret_file_is_private_and_malformed_ones_are_refused(tmp_path: Path):
    path = tmp_path / "secret"
    KeyRing.write_new(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyRing.load(path).keys[0][0] == "k1"
    with pytest.raises(FileExistsError):
        KeyRing.write_new(path)
    for text in ("", "k1:00", "k1:zz", "\n".join(f"k{n}:{'0' * 64}" for n in range(3))):
        path.write_text(text)
        with pytest.raises(ValueError):
            KeyRing.load(path)


# --- over sockets ---------------------------------------------------------------------------------------------------


async def serve_once(ring: KeyRing, handler):
    """A server for one connection: runs `handler(reader, writer)`; returns (port, task result future, server)."""
    outcome = asyncio.get_running_loop().create_future()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            outcome.set_result(await handler(reader, writer))
        except TransferError as error:
            outcome.set_exception(error)

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1], outcome, server


async def establish(ring: KeyRing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int = 1024):
    return await wire.establish(server_steps(ring, "front", b"s", accept), reader, writer, limit)


def test_asyncio_connection_carries_frames_and_reports_the_end(ring):
    async def scenario() -> None:
        port, outcome, server = await serve_once(ring, lambda r, w: establish(ring, r, w))
        client = await wire.dial("127.0.0.1", port, client_steps(ring, "front", b"c", accept), 1024)
        accepted = await outcome
        client.send(b"ping")
        assert await accepted.receive() == b"ping"
        accepted.send(b"p" * 1024)
        assert await client.receive() == b"p" * 1024
        client.close()
        with pytest.raises(PeerLost):
            await accepted.receive()
        accepted.close()
        accepted.send(b"into the void")
        server.close()

    asyncio.run(scenario())


def test_an_oversized_frame_is_refused_before_it_is_read(ring):
    async def scenario() -> None:
        port, outcome, server = await serve_once(ring, lambda r, w: establish(ring, r, w))
        client = await wire.dial("127.0.0.1", port, client_steps(ring, "front", b"c", accept), 1 << 20)
        accepted = await outcome
        client.send(b"x" * 1025)
        with pytest.raises(FrameInvalid, match="outside"):
            await accepted.receive()
        client.abort()
        accepted.abort()
        server.close()

    asyncio.run(scenario())


def test_an_oversized_first_frame_is_refused(ring):
    async def scenario() -> None:
        port, outcome, server = await serve_once(ring, lambda r, w: establish(ring, r, w))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(struct.pack("<I", (64 << 10) + 1))
        with pytest.raises(FrameInvalid):
            await outcome
        writer.close()
        server.close()

    asyncio.run(scenario())


def test_a_silent_client_is_cut_at_the_handshake_deadline(ring, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        port, outcome, server = await serve_once(ring, lambda r, w: establish(ring, r, w))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(DeadlineExceeded):
            await outcome
        writer.close()
        server.close()

    asyncio.run(scenario())


def test_nobody_listening_is_peer_lost(ring):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(PeerLost):
        asyncio.run(wire.dial("127.0.0.1", port, client_steps(ring, "front", b"", accept), 64))


def test_blocking_connection_carries_frames_and_close_wakes_the_receiver(ring):
    ours, theirs = socket.socketpair()
    ours, theirs = _tcp_pair(ours, theirs)
    made: list[wire.BlockingConnection] = []
    steps = server_steps(ring, "front", b"s", accept)
    thread = threading.Thread(target=lambda: made.append(wire.establish_blocking(steps, theirs, 1024)))
    thread.start()
    client = wire.establish_blocking(client_steps(ring, "front", b"c", accept), ours, 1024)
    thread.join(5)
    (accepted,) = made
    client.send(b"ping")
    assert accepted.receive(1.0) == b"ping"
    with pytest.raises(DeadlineExceeded):
        accepted.receive(0.01)
    ended: list[TransferError] = []

    def receive() -> None:
        try:
            client.receive()
        except TransferError as error:
            ended.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    client.close()
    waiting.join(5)
    assert isinstance(ended[0], PeerLost)
    accepted.close()


def _tcp_pair(*unused: socket.socket) -> tuple[socket.socket, socket.socket]:
    for sock in unused:
        sock.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs
