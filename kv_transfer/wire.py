"""Every socket of ours: framing, mutual handshake, MAC, for asyncio and for blocking sockets.

Knows bytes and HMAC. Knows no message: the planes (`workers.protocol` for the front link, `messages` for sessions and
lanes) encode their own with a `codec.Codec`. There is no pickle here and nothing of a peer is decoded before it is
authenticated except the fixed fields of the handshake frames.

    frame      u32 little-endian length of what follows | payload | 16-byte MAC (after the handshake)
    payload    msgpack array [tag, field, field, ...]
    MAC        HMAC-SHA256(direction key, u64 sequence number | payload)[:16]

    client                                   server
    HELLO(major, plane, key id, nonce, body) ->
                            <- CHALLENGE(nonce, body, mac_s over the transcript)
    PROOF(mac_c over the transcript)         ->
                            <- READY | REFUSE(code)         the first frame under the session keys
"""

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
import socket
import struct
import time
import typing
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from kv_transfer.codec import Between, Codec, Size
from kv_transfer.errors import DeadlineExceeded, FrameInvalid, HandshakeFailed, PeerLost, PeerRefused

PROTOCOL_MAJOR = 1
MAC_BYTES = 16
HANDSHAKE_FRAME_BYTES = 64 << 10
HANDSHAKE_TIMEOUT_S = 3.0
MAX_BODY_BYTES = 8 << 10
USER_TIMEOUT_MS = 3000


# --- keys and MACs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRing:
    """One or two secrets by id; the first is used to dial, any of them is accepted (rotation)."""

    keys: tuple[tuple[str, bytes], ...]

    @staticmethod
    def load(path: Path) -> "KeyRing":
        """Reads `key_id:hex` lines of a secret file. Raises ValueError when it is empty, malformed or holds over two
        keys."""
        pairs = [line.split(":", 1) for line in path.read_text().split() if ":" in line]
        if not 1 <= len(pairs) <= 2:
            raise ValueError(f"{path}: found {len(pairs)} keys, need one or two lines of the form key_id:hex")
        ring = KeyRing(tuple((key_id, bytes.fromhex(text)) for key_id, text in pairs))
        if any(len(key) < 16 for _, key in ring.keys):
            raise ValueError(f"{path}: a key is shorter than 16 bytes")
        return ring

    @staticmethod
    def write_new(path: Path) -> None:
        """Mints a random secret into `path`, readable by the owner only."""
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"k1:{secrets.token_hex(32)}\n")

    def plane_key(self, key_id: str, plane: str) -> bytes:
        for known, key in self.keys:
            if known == key_id:
                return hmac.digest(key, b"baton/1/" + plane.encode(), "sha256")
        raise HandshakeFailed(f"unknown key id {key_id!r}")


class Seal:
    """MACs outgoing payloads of one direction. One caller at a time."""

    def __init__(self, key: bytes) -> None:
        self._key, self._sequence = key, 0

    def frame(self, payload: bytes) -> bytes:
        mac = hmac.digest(self._key, struct.pack("<Q", self._sequence) + payload, "sha256")[:MAC_BYTES]
        self._sequence += 1
        return struct.pack("<I", len(payload) + MAC_BYTES) + payload + mac

    def open(self, sealed: bytes) -> bytes:
        """The payload of a received frame; raises `FrameInvalid` when the MAC or the sequence is wrong."""
        payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        wanted = hmac.digest(self._key, struct.pack("<Q", self._sequence) + payload, "sha256")[:MAC_BYTES]
        if not hmac.compare_digest(mac, wanted):
            raise FrameInvalid("frame MAC is wrong")
        self._sequence += 1
        return payload


# --- handshake (no I/O: a generator yields payloads to send, or None to receive one) --------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    major: typing.Annotated[int, Between(0, 1 << 16)]
    plane: typing.Annotated[str, Size(1, 16)]
    key_id: typing.Annotated[str, Size(1, 64)]
    nonce: typing.Annotated[bytes, Size(16, 16)]
    body: typing.Annotated[bytes, Size(0, MAX_BODY_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class Challenge:
    nonce: typing.Annotated[bytes, Size(16, 16)]
    body: typing.Annotated[bytes, Size(0, MAX_BODY_BYTES)]
    mac: typing.Annotated[bytes, Size(32, 32)]


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    mac: typing.Annotated[bytes, Size(32, 32)]


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    code: typing.Annotated[str, Size(1, 128)]


_HANDSHAKE = Codec(Hello, Challenge, Proof, Ready, Refuse, max_frame_bytes=HANDSHAKE_FRAME_BYTES, max_array=8)


@dataclasses.dataclass(frozen=True, slots=True)
class Established:
    """The outcome of a handshake: the plane, the peer's body (authenticated, not yet decoded) and the two
    directions."""

    plane: str
    peer_body: bytes
    outgoing: Seal
    incoming: Seal


Steps = Generator[bytes | None, bytes, Established]


_M = typing.TypeVar("_M")


def _expect(cls: type[_M], payload: bytes) -> _M:
    message = _HANDSHAKE.decode(payload)
    if isinstance(message, Refuse):
        raise PeerRefused(message.code)
    if not isinstance(message, cls):
        raise HandshakeFailed(f"expected {cls.__name__}, got {type(message).__name__}")
    return message


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"|" + transcript, "sha256")


def _plain(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def client_steps(ring: KeyRing, plane: str, body: bytes, check: Callable[[bytes], None]) -> Steps:
    """Dials: `check(server body)` runs after the server is authenticated and may raise. Yields whole frames."""
    key_id = ring.keys[0][0]
    key = ring.plane_key(key_id, plane)
    hello = _HANDSHAKE.encode(Hello(PROTOCOL_MAJOR, plane, key_id, secrets.token_bytes(16), body))
    yield _plain(hello)
    challenge = _expect(Challenge, (yield None))
    transcript = hashlib.sha256(hello + challenge.nonce + challenge.body).digest()
    if not hmac.compare_digest(challenge.mac, _mac(key, b"server", transcript)):
        raise HandshakeFailed("the server does not hold the secret")
    check(challenge.body)
    yield _plain(_HANDSHAKE.encode(Proof(_mac(key, b"client", transcript))))
    outgoing, incoming = Seal(_mac(key, b"up", transcript)), Seal(_mac(key, b"down", transcript))
    _expect(Ready, incoming.open((yield None)))
    return Established(plane, challenge.body, outgoing, incoming)


Check = Callable[[bytes], str | None]


def server_steps(ring: KeyRing, plane: str, body: bytes, check: Check) -> Steps:
    """Answers one plane: `check(client body)` runs after the client is authenticated; a returned code refuses it."""
    return listen_steps(ring, body, {plane: check})


def listen_steps(ring: KeyRing, body: bytes, checks: Mapping[str, Check]) -> Steps:
    """Answers on a port that serves several planes; `Established.plane` tells which one the client chose."""
    first = yield None
    hello = _expect(Hello, first)
    if hello.major != PROTOCOL_MAJOR or hello.plane not in checks:
        yield _plain(_HANDSHAKE.encode(Refuse("wrong_protocol")))
        ours = f"we speak {PROTOCOL_MAJOR} of {sorted(checks)}"
        raise HandshakeFailed(f"peer speaks major {hello.major} of plane {hello.plane!r}, {ours}")
    key = ring.plane_key(hello.key_id, hello.plane)
    nonce = secrets.token_bytes(16)
    transcript = hashlib.sha256(first + nonce + body).digest()
    yield _plain(_HANDSHAKE.encode(Challenge(nonce, body, _mac(key, b"server", transcript))))
    proof = _expect(Proof, (yield None))
    if not hmac.compare_digest(proof.mac, _mac(key, b"client", transcript)):
        raise HandshakeFailed("the client does not hold the secret")
    outgoing, incoming = Seal(_mac(key, b"down", transcript)), Seal(_mac(key, b"up", transcript))
    refusal = checks[hello.plane](hello.body)
    if refusal is not None:
        yield outgoing.frame(_HANDSHAKE.encode(Refuse(refusal)))
        raise HandshakeFailed(f"refused a client: {refusal}")
    yield outgoing.frame(_HANDSHAKE.encode(Ready()))
    return Established(hello.plane, hello.body, outgoing, incoming)


# --- asyncio connection ---------------------------------------------------------------------------------------------


def tune_socket(sock: socket.socket) -> None:
    """No Nagle delay, keepalive on, and a peer that vanished without FIN is noticed within USER_TIMEOUT_MS of unsent
    data."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class Connection:
    """An authenticated asyncio connection. All methods on the loop that made it; `receive` has one caller at a time.

    `receive` waits until a frame arrives or the connection ends: silence is judged by the plane's heartbeat, which
    closes it.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, established: Established, max_frame_bytes: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._established, self._max = established, max_frame_bytes + MAC_BYTES

    @property
    def plane(self) -> str:
        return self._established.plane

    @property
    def peer_body(self) -> bytes:
        return self._established.peer_body

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def send(self, payload: bytes) -> None:
        """Queues one frame without waiting; a closed connection swallows it (the reader reports the loss)."""
        if not self._writer.is_closing():
            self._writer.write(self._established.outgoing.frame(payload))

    async def receive(self) -> bytes:
        """The next payload. Raises `PeerLost` at the end of the connection, `FrameInvalid` on damage."""
        return self._established.incoming.open(await _read_frame(self._reader, self._max, minimum=MAC_BYTES))

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Closes at once and drops what is unsent."""
        self._writer.transport.abort()


async def _read_frame(reader: asyncio.StreamReader, max_bytes: int, minimum: int = 1) -> bytes:
    try:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        if not minimum <= length <= max_bytes:
            raise FrameInvalid(f"frame of {length} bytes outside [{minimum}, {max_bytes}]")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise PeerLost(f"connection ended ({type(error).__name__})") from None


async def _run_steps(steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Established:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            outgoing = next(steps)
            while True:
                if outgoing is None:
                    outgoing = steps.send(await _read_frame(reader, HANDSHAKE_FRAME_BYTES))
                else:
                    writer.write(outgoing)
                    outgoing = next(steps)
    except StopIteration as done:
        established: Established = done.value
        return established
    except TimeoutError:
        raise DeadlineExceeded(f"handshake did not finish within {HANDSHAKE_TIMEOUT_S} s") from None


async def establish(
    steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_frame_bytes: int
) -> Connection:
    """Runs a handshake over an open stream pair. Closes it and raises `TransferError` on failure. Cancel-safe."""
    try:
        tune_socket(writer.get_extra_info("socket"))
        return Connection(reader, writer, await _run_steps(steps, reader, writer), max_frame_bytes)
    except BaseException:
        writer.close()
        raise


async def dial(host: str, port: int, steps: Steps, max_frame_bytes: int) -> Connection:
    """Connects and runs the client handshake within HANDSHAKE_TIMEOUT_S for each half. Raises `TransferError`."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise DeadlineExceeded(f"no connection to {host}:{port} within {HANDSHAKE_TIMEOUT_S} s") from None
    except OSError as error:
        raise PeerLost(f"cannot connect to {host}:{port} ({type(error).__name__})") from None
    return await establish(steps, reader, writer, max_frame_bytes)


# --- blocking connection (lanes: one thread owns each direction) ----------------------------------------------------


class BlockingConnection:
    """An authenticated connection over a blocking socket. One sending and one receiving thread at most."""

    def __init__(self, sock: socket.socket, established: Established, max_frame_bytes: int) -> None:
        self._sock, self._established, self._max = sock, established, max_frame_bytes + MAC_BYTES

    @property
    def peer_body(self) -> bytes:
        return self._established.peer_body

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, payload: bytes) -> None:
        """Sends one frame. Raises `PeerLost`."""
        try:
            self._sock.sendall(self._established.outgoing.frame(payload))
        except OSError as error:
            raise PeerLost(f"cannot send ({type(error).__name__})") from None

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next payload. Raises `PeerLost`, `FrameInvalid`, or `DeadlineExceeded` (the connection is then
        unusable)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return self._established.incoming.open(_read_blocking(self._sock, self._max, deadline, minimum=MAC_BYTES))

    def close(self) -> None:
        """Closes from any thread and wakes a blocked `receive`. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def _read_exactly(sock: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("no frame within the deadline")
        try:
            sock.settimeout(remaining)
            part = sock.recv(length - len(parts))
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerLost(f"connection ended ({type(error).__name__})") from None
        if not part:
            raise PeerLost("connection ended (EOF)")
        parts += part
    return bytes(parts)


def _read_blocking(sock: socket.socket, max_bytes: int, deadline: float | None, minimum: int = 1) -> bytes:
    (length,) = struct.unpack("<I", _read_exactly(sock, 4, deadline))
    if not minimum <= length <= max_bytes:
        raise FrameInvalid(f"frame of {length} bytes outside [{minimum}, {max_bytes}]")
    return _read_exactly(sock, length, deadline)


def establish_blocking(steps: Steps, sock: socket.socket, max_frame_bytes: int) -> BlockingConnection:
    """Runs a handshake over a blocking socket within HANDSHAKE_TIMEOUT_S. Closes it and raises `TransferError` on
    failure."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    try:
        tune_socket(sock)
        outgoing = next(steps)
        while True:
            if outgoing is None:
                outgoing = steps.send(_read_blocking(sock, HANDSHAKE_FRAME_BYTES, deadline))
            else:
                sock.settimeout(HANDSHAKE_TIMEOUT_S)
                sock.sendall(outgoing)
                outgoing = next(steps)
    except StopIteration as done:
        sock.settimeout(None)
        return BlockingConnection(sock, done.value, max_frame_bytes)
    except OSError as error:
        sock.close()
        raise PeerLost(f"handshake failed ({type(error).__name__})") from None
    except BaseException:
        sock.close()
        raise
