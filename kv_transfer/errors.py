"""What can go wrong on our sockets and in a transfer.

    TransferError
    |-- FrameInvalid        a frame is too large, damaged, or not a message of this plane
    |-- HandshakeFailed     the two ends do not share a secret, a protocol major or a layout
    |-- PeerLost            the connection ended, or the peer was silent for too long
    |-- PeerRefused         the peer answered the handshake with a reason code
    |-- LaneUnavailable     no warmed lane to that peer
    |-- OutOfOrder          a message that the state of its transfer forbids
    `-- DeadlineExceeded    a wait ran past its deadline

Concurrency: exceptions carry text only and may cross threads.
"""


class TransferError(Exception):
    """Base of every error raised by `kv_transfer`."""


class FrameInvalid(TransferError):
    """A frame broke a limit, failed its MAC, or does not decode to a known message."""


class HandshakeFailed(TransferError):
    """The peer could not prove that it holds the secret, or speaks another protocol major."""


class PeerRefused(HandshakeFailed):
    """The authenticated peer refused the connection; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the peer refused the connection: {code}")
        self.code = code


class PeerLost(TransferError):
    """The connection to the peer ended or fell silent."""


class LaneUnavailable(TransferError):
    """There is no open lane to the named peer."""


class OutOfOrder(TransferError):
    """A peer sent what the state of that transfer forbids; the text tells the transfer's story so far."""


class DeadlineExceeded(TransferError):
    """A wait ran past its deadline."""
