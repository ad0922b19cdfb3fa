"""The life of a request at the front door, step by step: the file to read first.

    read     limits, JSON, a checked Ask                            openai/, exchange.py
    tokenize chat template and tokenizer, off the event loop        text/
    admit    context and pool limits, deadlines, the one queue      admission.py, dispatcher.py
    answer   ids to text, stop strings, SSE or one JSON document    answer.py, openai/
    leave    whatever happened: the work is aborted and forgotten   dispatcher.py

One task per request. A client that hangs up ends the stream at once, whichever step the request is in.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from pydantic import JsonValue

from router.admission import Door, decide_admission
from router.answer import Answer
from router.config import RouterConfig
from router.context import Trail, describe_end, find_deadlines, plan_sampling
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.exchange import ClientGone, Exchange
from router.openai import sse
from router.openai.ask import Ask, ChatPrompt, Piece, Prompt, ReplyShape, TextPrompt, TokenPrompt, Usage
from router.openai.chat import ChatShape, parse_chat
from router.openai.completions import CompletionShape, parse_completion
from router.openai.models import check_model
from router.openai.sampling import NO_LOGPROBS
from router.openai.schemas import parse_json_object
from router.stream import LiveStream, Marks, Standing
from router.text.stop import StopMatcher
from router.text.templates import TemplateRefused
from router.text.tokenizer import Tokenizer
from router.worker_view import pool_tokens
from workers.protocol import AbortReason

logger = logging.getLogger(__name__)


Reply = Callable[[Exchange, Ask, LiveStream, Trail], Awaitable[None]]


class Pipeline:
    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
        threads: Executor,
    ) -> None:
        self._config, self._tokenizer, self._dispatcher = config, tokenizer, dispatcher
        self._clock, self._threads = clock, threads
        self._sequence = itertools.count()
        self.may_come, self.is_closing = True, False

    async def serve(self, exchange: Exchange, endpoint: str, explainer: Reply | None = None) -> None:
        """Answers one completion request, whatever its outcome, and logs one line.

        With an `explainer` the workers are asked for their facts and it writes the answer.
        """
        trail = Trail(request=secrets.token_hex(12), arrived=self._clock())
        try:
            raw = await exchange.read_body(self._config.max_body_bytes, self._config.body_s)
            ask = self.read(raw, endpoint)
            async with self.watched(exchange, trail):
                prompt = await self.tokenize(ask.prompt, trail)
                stream = self.admit(ask, prompt, trail, exchange.header(b"x-baton-timeout-s"), explainer is not None)
                await (explainer or self._reply)(exchange, ask, stream, trail)
        except ApiError as error:
            trail.verdict = error.code
            await self._send_error(exchange, error)
        except ClientGone as gone:
            trail.verdict = "slow_client" if gone.is_slow else "disconnect"
        finally:
            self._leave(trail)
            logger.info(describe_end(trail, exchange.path, exchange.status, self._clock()))

    # --- the steps --------------------------------------------------------------------------------------------------

    def read(self, raw: bytes, endpoint: str) -> Ask:
        """Raises `ApiError` for anything that is wrong in itself."""
        document: dict[str, JsonValue] = parse_json_object(raw)
        parse = parse_chat if endpoint == "chat" else parse_completion
        model, ask = parse(document, self._config.max_stop_strings, self._config.max_stop_chars)
        check_model(model, self._config.model_id)
        return ask

    async def tokenize(self, prompt: Prompt, trail: Trail) -> list[int]:
        """The prompt's ids, at least one. Raises `ApiError`."""
        if isinstance(prompt, TokenPrompt):
            tokens = self._check_ids(prompt)
        else:
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(self._threads, self._encode, prompt, trail)
        trail.tokenized, trail.prompt = self._clock(), tokens
        if not tokens:
            raise ApiError("invalid_request", "The prompt has no tokens.", param="prompt")
        return tokens

    def admit(
        self, ask: Ask, prompt: list[int], trail: Trail, timeout: bytes | None, explain: bool = False
    ) -> LiveStream:
        """A stream in the queue, or already on its way. Raises `ApiError`."""
        deadlines = find_deadlines(self._config, trail.arrived, timeout)
        held = pool_tokens(self._dispatcher.snapshots()) or self._config.max_context_tokens
        limit = min(self._config.max_context_tokens, held)
        sampling = plan_sampling(ask, len(prompt), limit, self._tokenizer, self._config)
        admission = decide_admission(self._look_at_door())
        if isinstance(admission, ApiError):
            raise admission
        standing = Standing(ask.priority, ask.tenant)
        stream = LiveStream(prompt, sampling, deadlines, Marks(trail.arrived), next(self._sequence), explain, standing)
        trail.stream = stream
        self._dispatcher.submit(stream)
        return stream

    def listen(self, ask: Ask, stream: LiveStream, trail: Trail) -> Answer:
        """The text of the stream, as it comes."""
        trail.answer = Answer(stream, self._tokenizer, StopMatcher(ask.stops))
        return trail.answer

    async def _reply(self, exchange: Exchange, ask: Ask, stream: LiveStream, trail: Trail) -> None:
        answer = self.listen(ask, stream, trail)
        shape = self._make_shape(ask, trail.request)
        if ask.stream:
            await self._reply_events(exchange, ask, answer, shape, stream)
            return
        pieces = [piece async for piece in answer.pieces()]
        whole = Piece("".join(piece.text for piece in pieces), tuple(e for piece in pieces for e in piece.entries))
        assert answer.reason is not None
        await exchange.send_json(200, shape.whole(whole, answer.reason, self._usage(stream, answer)))

    async def _reply_events(
        self, exchange: Exchange, ask: Ask, answer: Answer, shape: ReplyShape, stream: LiveStream
    ) -> None:
        async for piece in answer.pieces():
            self._stop_workers(answer, stream)
            await exchange.send_events(sse.encode_event(shape.chunk(piece)))
        self._stop_workers(answer, stream)
        assert answer.reason is not None
        events = sse.encode_event(shape.finish(answer.reason))
        if ask.include_usage:
            events += sse.encode_event(shape.usage(self._usage(stream, answer)))
        await exchange.send_events(events + sse.DONE, is_last=True)

    def _stop_workers(self, answer: Answer, stream: LiveStream) -> None:
        """After a stop string the work ends at once, however slow the client is."""
        if answer.is_stopped:
            self._dispatcher.leave(stream, "stop")

    # --- what the steps stand on ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def watched(self, exchange: Exchange, trail: Trail) -> AsyncIterator[None]:
        """Inside, a client that hangs up ends the request: its stream is aborted and the body sees `ClientGone`."""
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            await exchange.wait_gone()
            if exchange.is_ended:
                return
            is_gone = True
            if trail.stream is not None:
                self._dispatcher.leave(trail.stream, "disconnect")
            task.cancel()

        watcher = asyncio.create_task(watch(), name=f"watch-{trail.request}")
        try:
            yield
        except asyncio.CancelledError:
            if not is_gone or task.uncancel() > 0:
                raise
            raise ClientGone(is_slow=False) from None
        finally:
            watcher.cancel()

    def _encode(self, prompt: ChatPrompt | TextPrompt, trail: Trail) -> list[int]:
        if isinstance(prompt, TextPrompt):
            trail.rendered = prompt.text
            return self._tokenizer.encode(prompt.text, add_special_tokens=True)
        if self._tokenizer.template is None:
            raise ApiError("unsupported", "This model has no chat template; use /v1/completions.", param="messages")
        try:
            trail.rendered = self._tokenizer.template.render(prompt.messages)
        except TemplateRefused as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise ApiError("invalid_request", message[:500], param="messages") from None
        return self._tokenizer.encode(trail.rendered, add_special_tokens=False)

    def _check_ids(self, prompt: TokenPrompt) -> list[int]:
        size = self._tokenizer.vocab_size
        for index, token in enumerate(prompt.tokens):
            if not 0 <= token < size:
                message = f"Invalid 'prompt[{index}]': token ids of this model are 0 to {size - 1}."
                raise ApiError("invalid_request", message, param=f"prompt[{index}]")
        return list(prompt.tokens)

    def _look_at_door(self) -> Door:
        head = self._dispatcher.queue.head()
        return Door(
            num_queued=len(self._dispatcher.queue),
            max_queued=self._config.max_queued,
            head_waited_s=self._clock() - head.marks.queued if head is not None else 0.0,
            has_workers=bool(self._dispatcher.snapshots()),
            may_come=self.may_come,
            is_closing=self.is_closing,
        )

    def _make_shape(self, ask: Ask, request: str) -> ReplyShape:
        prefix, make = ("chatcmpl", ChatShape) if ask.endpoint == "chat" else ("cmpl", CompletionShape)
        head: dict[str, object] = {
            "id": f"{prefix}-{request}",
            "created": int(time.time()),
            "model": self._config.model_id,
        }
        return make(head, ask.include_usage, ask.sampling.logprobs != NO_LOGPROBS)

    def _usage(self, stream: LiveStream, answer: Answer) -> Usage:
        return Usage(stream.num_prompt, answer.num_tokens, min(stream.num_cached, stream.num_prompt))

    async def _send_error(self, exchange: Exchange, error: ApiError) -> None:
        try:
            await exchange.send_error(error)
        except ClientGone:
            logger.debug("client left before its error")

    def _leave(self, trail: Trail) -> None:
        reasons: dict[str, AbortReason] = {"ok": "stop", "slow_client": "slow_client"}
        if trail.stream is not None:
            self._dispatcher.leave(trail.stream, reasons.get(trail.verdict, "disconnect"))
