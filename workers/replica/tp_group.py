"""A tensor-parallel group: rank 0 is the leader's process, every other rank a process that does what the leader plans.

    leader                                     rank r > 0
                                            <- dials, says its rank (handshake of `kv_transfer/wire.py`)
                                            <- ADDRESS: where gloo finds it, or the id of NCCL
    ADDRESSES of all ranks                  ->
                                            <- READY once its part of the weights is loaded and proven to run
    PLAN before each of its own steps       ->    the same forward pass, joined by the collectives in it

Nothing answers a plan: the collectives keep the ranks in step, and the logits end at the leader. The group dies as one:
a rank that loses the leader ends its process, and the leader learns of a lost rank at once, through `on_lost`.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from kv_transfer.codec import Between, Codec, Size
from kv_transfer.errors import FrameInvalid, PeerLost, TransferError
from kv_transfer.layout import Dtype, KeyOrder
from kv_transfer.wire import (
    BlockingConnection,
    KeyRing,
    client_steps,
    establish_blocking,
    server_steps,
)
from workers.engine.plan import Chunk, RunResult, StepPlan, ignore_layer
from workers.model.arch import read_spec
from workers.model.build import WeightMode, load_decoder
from workers.model.collective import Parallel
from workers.model.decoder import Decoder
from workers.model.sharding import Shard
from workers.ops.select import BackendName, select_ops
from workers.protocol import SamplingParams, StreamKey, pack_tokens, unpack_tokens
from workers.replica.rank_collectives import GroupCollective, join_gloo, join_nccl
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

PLANE = "rank"
START_TIMEOUT_S = 120.0
"""For every rank to dial and to load its part."""
MAX_FRAME_BYTES = 16 << 20
MAX_RANKS = 64
_Packed = Annotated[bytes, Size(0, MAX_FRAME_BYTES)]


@dataclass(frozen=True, slots=True)
class Address:
    address: Annotated[bytes, Size(1, 4096)]


@dataclass(frozen=True, slots=True)
class Addresses:
    addresses: Annotated[tuple[Annotated[bytes, Size(1, 4096)], ...], Size(2, MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class RankReady:
    pass


@dataclass(frozen=True, slots=True)
class RankChunk:
    """What a rank needs of a chunk: it samples nothing."""

    tokens: _Packed
    first_position: Annotated[int, Between(0, 1 << 40)]
    tables: Annotated[tuple[_Packed, ...], Size(1, 64)]
    """One per state group, see `_pack_table`."""
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: Annotated[tuple[RankChunk, ...], Size(1, 1 << 16)]


_CODEC = Codec(Address, Addresses, RankReady, Plan, max_frame_bytes=MAX_FRAME_BYTES, max_array=1 << 16)


def encode_plan(plan: StepPlan) -> bytes:
    return _CODEC.encode(Plan(tuple(_encode_chunk(chunk) for chunk in plan.chunks)))


def _encode_chunk(chunk: Chunk) -> RankChunk:
    return RankChunk(
        pack_tokens(chunk.tokens),
        chunk.first_position,
        tuple(_pack_table(table) for table in chunk.tables),
        chunk.sampling is not None,
    )


def _pack_table(blocks: tuple[int, ...]) -> bytes:
    """Block numbers and one more: NULL_BLOCK is -1, and tokens are not negative."""
    return pack_tokens([block + 1 for block in blocks])


def decode_plan(message: Plan) -> StepPlan:
    """A plan that computes the same rows as the leader's."""
    return StepPlan(tuple(_decode_chunk(number, chunk) for number, chunk in enumerate(message.chunks)))


def _decode_chunk(number: int, chunk: RankChunk) -> Chunk:
    return Chunk(
        key=StreamKey(number.to_bytes(16, "big"), 0),
        tokens=tuple(unpack_tokens(chunk.tokens)),
        first_position=chunk.first_position,
        tables=tuple(tuple(block - 1 for block in unpack_tokens(table)) for table in chunk.tables),
        sampling=SamplingParams() if chunk.is_sampled else None,
        output_position=0,
        explain=False,
        is_prompt=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What every rank of a group agrees on."""

    folder: Path
    mode: WeightMode
    kv_dtype: Dtype
    block_tokens: int
    num_blocks: int
    max_context_tokens: int
    backend: BackendName
    num_threads: int
    """Of each rank."""
    num_ranks: int
    host: str
    """A private interface: of the leader's listener and of every rank's gloo socket."""
    secret_path: Path


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's part, ready to run."""

    decoder: Decoder
    cache: PagedKVCache
    how: str


def load_rank(config: GroupConfig, rank: int, exchange: Callable[[bytes], tuple[bytes, ...]]) -> RankModel:
    """Joins the group and loads this rank's part. Raises `PeerLost` and what `load_decoder` and `select_ops` raise."""
    group: Any
    if config.backend == "cuda":
        if torch.cuda.is_available():  # where a rank sees one GPU alone, that is its own
            torch.cuda.set_device(rank % torch.cuda.device_count())
        group = join_nccl(rank, config.num_ranks, exchange)
    else:
        group = join_gloo(rank, config.num_ranks, config.host, exchange)
    choice = select_ops(config.backend, config.num_threads, config.block_tokens)
    spec, shard = read_spec(config.folder), Shard(rank, config.num_ranks)
    collective = GroupCollective(group, rank, config.num_ranks, spec.vocab_size)
    parallel = Parallel(shard, collective, shard.vocabulary(spec.vocab_size))
    decoder = load_decoder(
        config.folder, config.mode, choice.ops, max_positions=config.max_context_tokens, parallel=parallel
    )
    keys: KeyOrder = "dim_major" if choice.ops.key_is_dim_major else "token_major"
    layout = plan_layout(spec, decoder.state(config.kv_dtype), config.block_tokens, config.kv_dtype, keys)
    return RankModel(decoder, PagedKVCache(layout, config.num_blocks, choice.ops.device), choice.reason)


class GroupLeader:
    """Rank 0's end: waits for the others, sends them plans. `on_lost` runs on a thread of its own, at most once."""

    def __init__(self, config: GroupConfig, on_lost: Callable[[int], None]) -> None:
        """Listens at once; `port` is what the ranks dial."""
        self._config, self._on_lost = config, on_lost
        self._ring = KeyRing.load(config.secret_path)
        self._listener = socket.create_server((config.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._ranks: dict[int, BlockingConnection] = {}
        self._lock = threading.Lock()
        self._is_ended = False

    def start(self) -> RankModel:
        """Rank 0's part, once every rank has loaded its own. Raises `TransferError` where one does not come."""
        config = self._config
        self._listener.settimeout(START_TIMEOUT_S)
        while len(self._ranks) < config.num_ranks - 1:
            self._accept()
        self._listener.close()
        model = load_rank(config, 0, self._exchange)
        for rank, connection in self._ranks.items():
            message = _CODEC.decode(connection.receive(START_TIMEOUT_S))
            if not isinstance(message, RankReady):
                raise FrameInvalid(f"rank {rank} says {type(message).__name__} instead of READY")
            threading.Thread(target=self._watch, args=(rank,), name=f"baton-rank-{rank}", daemon=True).start()
        return model

    def send(self, plan: StepPlan) -> None:
        """Before the leader runs the plan itself. Raises `PeerLost`."""
        payload = encode_plan(plan)
        for connection in self._ranks.values():
            connection.send(payload)

    def close(self) -> None:
        """Ends the group: every rank ends when its connection does."""
        with self._lock:
            self._is_ended = True
        self._listener.close()
        for connection in self._ranks.values():
            connection.close()

    def _accept(self) -> None:
        """One rank more; whoever does not know the secret, or names a rank that is taken, is turned away."""
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            raise PeerLost(f"{len(self._ranks)} of {self._config.num_ranks - 1} ranks came in time") from None
        found: list[int] = []

        def check(body: bytes) -> str | None:
            rank = int.from_bytes(body, "little")
            if not 0 < rank < self._config.num_ranks or rank in self._ranks:
                return "wrong_rank"
            found.append(rank)
            return None

        try:
            connection = establish_blocking(server_steps(self._ring, PLANE, b"", check), sock, MAX_FRAME_BYTES)
        except TransferError as error:
            logger.warning("a connection to the rank listener was refused: %s", error)
            return
        self._ranks[found[0]] = connection

    def _exchange(self, own: bytes) -> tuple[bytes, ...]:
        addresses = {0: own}
        for rank, connection in self._ranks.items():
            message = _CODEC.decode(connection.receive(START_TIMEOUT_S))
            if not isinstance(message, Address):
                raise FrameInvalid(f"rank {rank} says {type(message).__name__} instead of its address")
            addresses[rank] = message.address
        ordered = tuple(addresses[rank] for rank in range(self._config.num_ranks))
        for connection in self._ranks.values():
            connection.send(_CODEC.encode(Addresses(ordered)))
        return ordered

    def _watch(self, rank: int) -> None:
        """A rank says nothing after READY: whatever arrives is its end."""
        try:
            self._ranks[rank].receive()
        except TransferError:
            pass
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        self._on_lost(rank)


class GroupRunner:
    """The engine's `Runner` over a whole group: each plan goes to the ranks before the leader runs it."""

    def __init__(self, leader: GroupLeader, runner: ModelRunner) -> None:
        self._leader, self._runner = leader, runner

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        """See `engine/plan.py`. Raises `PeerLost` where the group has lost a rank."""
        self._leader.send(plan)
        return self._runner.execute(plan, on_layer)


def run_rank(config: GroupConfig, rank: int, port: int) -> None:
    """A rank's whole life in its process. Returns when the leader has gone; raises what loading raises."""
    ring = KeyRing.load(config.secret_path)
    sock = socket.create_connection((config.host, port), START_TIMEOUT_S)
    steps = client_steps(ring, PLANE, rank.to_bytes(4, "little"), lambda body: None)
    connection = establish_blocking(steps, sock, MAX_FRAME_BYTES)

    def exchange(own: bytes) -> tuple[bytes, ...]:
        connection.send(_CODEC.encode(Address(own)))
        message = _CODEC.decode(connection.receive(START_TIMEOUT_S))
        if not isinstance(message, Addresses):
            raise FrameInvalid(f"the leader says {type(message).__name__} instead of the addresses")
        return message.addresses

    model = load_rank(config, rank, exchange)
    connection.send(_CODEC.encode(RankReady()))
    try:
        while True:
            message = _CODEC.decode(connection.receive())
            if not isinstance(message, Plan):
                raise FrameInvalid(f"the leader says {type(message).__name__} instead of a plan")
            follow(model, decode_plan(message))
    except PeerLost as error:
        logger.info("rank %d ends: %s", rank, error)
    finally:
        connection.close()


def follow(model: RankModel, plan: StepPlan) -> None:
    """The forward pass of a plan, for its part in the collectives and its K and V."""
    batch = make_batch(plan, model.cache, ignore_layer)
    model.decoder.forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)


def end_process(lost_rank: int) -> None:
    """The usual `on_lost`: the group dies as one, and whoever watches this process replaces all of it."""
    logger.critical("rank %d is lost, ending the group", lost_rank)
    os._exit(1)
