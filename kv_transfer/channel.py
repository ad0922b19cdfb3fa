"""Read this first: how the KV cache of a prompt gets from a prefill worker's blocks into a decode worker's.

    prefill replica                                               decode replica
    KVSender (sender.py)                                          KVReceiver (receiver.py)
      engine thread: begin push finish abort                        engine thread: expect revoke
      event loop:    one Link per decode worker   <-- session -->   event loop:    one Link per prefill worker (dials)
      lane thread:   waits for its sends          ==  lane  ==>     lane thread:   waits, writes blocks

1. Decode dials every prefill worker it is told of (`set_sources`): a session, then a lane, each after a mutual
   handshake (`wire`); the lane's data pair (`transports`) is opened and warmed. Only then is the peer open to requests.
2. Decode reserves blocks and calls `expect`; prefill calls `begin`: BEGIN, and GRANT comes back at once.
3. After each layer group of each chunk prefill calls `push`: the unit is gathered (`staging`) and queued. When granted
   it is announced (UNIT) and sent, four at a time (`lane`).
4. Decode posts a receive per notice into staging memory and writes it into the granted blocks under the write window
   (`grants`).
5. `finish`: when all units are sent FIN carries their digests and the caller's meta; decode compares, answers ADOPTED
   and emits Arrived. Prefill emits Adopted.
6. `abort`, `revoke`, a bad unit, a lost or silent peer: `session` and `grants` hold the tables; every path ends, and
   blocks come back exactly once.

The states and every message stand in docs/protocol.md; `link` owns connection, heartbeat and silence.
"""

from kv_transfer.events import (
    Adopted,
    Arrived,
    ArrivedUnit,
    BlocksProven,
    Granted,
    KVSource,
    PeerDown,
    PeerUp,
    ReceiverEvent,
    ReceiveTrace,
    SenderEvent,
    SendTrace,
    SentUnit,
    SourceDown,
    SourceUp,
    TransferFailed,
)
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender

__all__ = [
    "Adopted",
    "Arrived",
    "ArrivedUnit",
    "BlocksProven",
    "Granted",
    "KVReceiver",
    "KVSender",
    "KVSource",
    "PeerDown",
    "PeerUp",
    "ReceiveTrace",
    "ReceiverEvent",
    "SendTrace",
    "SenderEvent",
    "SentUnit",
    "SourceDown",
    "SourceUp",
    "TransferFailed",
]
