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
from router.openai.ask import Ask, ChatPrompt, Piece, Prompt, ReplyShape, TextPrompt, TokenPrompt, Usage, join_pieces
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
from workers.protocol import AbortReason, FinishReason

logger = logging.getLogger(__name__)


Reply = Callable[[Exchange, Ask, LiveStream, Trail], Awaitable[None]]
Tell = Callable[[int, Piece], Awaitable[None]]


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
        self._submit(stream, trail)
        return stream

    def listen(self, ask: Ask, stream: LiveStream, trail: Trail) -> Answer:
        """The text of the stream, as it comes."""
        answer = Answer(stream, self._tokenizer, StopMatcher(ask.stops))
        trail.answers.append(answer)
        return answer

    async def _reply(self, exchange: Exchange, ask: Ask, stream: LiveStream, trail: Trail) -> None:
        shape = self._make_shape(ask, trail.request)
        if ask.stream:
            await self._reply_events(exchange, ask, stream, shape, trail)
            return
        choices: dict[int, list[Piece]] = {index: [] for index in range(ask.num_choices)}

        async def keep(index: int, piece: Piece) -> None:
            choices[index].append(piece)

        reasons = await self._tell_choices(ask, stream, trail, keep)
        wholes = [(join_pieces(choices[index]), reason) for index, reason in enumerate(reasons)]
        await exchange.send_json(200, shape.whole(wholes, self._usage(trail)))

    async def _reply_events(
        self, exchange: Exchange, ask: Ask, stream: LiveStream, shape: ReplyShape, trail: Trail
    ) -> None:
        turn = asyncio.Lock()

        async def send(index: int, piece: Piece) -> None:
            async with turn:
                await exchange.send_events(sse.encode_event(shape.chunk(index, piece)))

        reasons = await self._tell_choices(ask, stream, trail, send)
        events = b"".join(sse.encode_event(shape.finish(index, reason)) for index, reason in enumerate(reasons))
        if ask.include_usage:
            events += sse.encode_event(shape.usage(self._usage(trail)))
        await exchange.send_events(events + sse.DONE, is_last=True)

    async def _tell_choices(self, ask: Ask, first: LiveStream, trail: Trail, tell: Tell) -> list[FinishReason]:
        """Why each choice ended, after each of its pieces was told. Raises the first error of any of them.

        The others start when the first has a token: by then the prompt is in the prefix cache, and they share it.
        """
        if ask.num_choices == 1:
            return [await self._tell_choice(0, ask, first, trail, tell)]
        try:
            async with asyncio.TaskGroup() as group:
                told = [group.create_task(self._tell_choice(0, ask, first, trail, tell))]
                await first.wait_beyond(0)
                is_lost = isinstance(first.outcome, ApiError)
                for index in range(1, 1 if is_lost else ask.num_choices):
                    other = first.another_choice(index, next(self._sequence), self._clock())
                    self._submit(other, trail)
                    told.append(group.create_task(self._tell_choice(index, ask, other, trail, tell)))
        except* (ApiError, ClientGone) as errors:
            raise find_first(errors) from None
        return [task.result() for task in told]

    async def _tell_choice(self, index: int, ask: Ask, stream: LiveStream, trail: Trail, tell: Tell) -> FinishReason:
        answer = self.listen(ask, stream, trail)
        async for piece in answer.pieces():
            self._stop_workers(answer, stream)
            await tell(index, piece)
        self._stop_workers(answer, stream)
        assert answer.reason is not None
        return answer.reason

    def _submit(self, stream: LiveStream, trail: Trail) -> None:
        trail.streams.append(stream)
        self._dispatcher.submit(stream)

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
            for stream in trail.streams:
                self._dispatcher.leave(stream, "disconnect")
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

    def _usage(self, trail: Trail) -> Usage:
        first = trail.streams[0]
        told = sum(answer.num_tokens for answer in trail.answers)
        return Usage(first.num_prompt, told, min(first.num_cached, first.num_prompt))

    async def _send_error(self, exchange: Exchange, error: ApiError) -> None:
        try:
            await exchange.send_error(error)
        except ClientGone:
            logger.debug("client left before its error")

    def _leave(self, trail: Trail) -> None:
        reasons: dict[str, AbortReason] = {"ok": "stop", "slow_client": "slow_client"}
        for stream in trail.streams:
            self._dispatcher.leave(stream, reasons.get(trail.verdict, "disconnect"))


def find_first(errors: BaseExceptionGroup[ApiError | ClientGone]) -> ApiError | ClientGone:
    """A client that is gone counts before what went wrong with its answer."""
    flat = [error for error in errors.exceptions if isinstance(error, ApiError | ClientGone)]
    return next((error for error in flat if isinstance(error, ClientGone)), flat[0])
