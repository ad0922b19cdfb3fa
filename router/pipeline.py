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
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import JsonValue

from router.admission import Door, decide_admission
from router.answer import Answer
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.exchange import ClientGone, Exchange
from router.openai import sse
from router.openai.ask import Ask, ChatPrompt, Prompt, ReplyShape, TextPrompt, TokenPrompt, Usage
from router.openai.chat import ChatShape, parse_chat
from router.openai.completions import CompletionShape, parse_completion
from router.openai.models import check_model
from router.openai.schemas import parse_json_object
from router.stream import Deadlines, LiveStream, Marks
from router.text.stop import StopMatcher
from router.text.templates import TemplateRefused
from router.text.tokenizer import Tokenizer
from router.worker_view import pool_tokens
from workers.protocol import AbortReason, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Trail:
    """What the log line at the end of a request tells."""

    request: str
    arrived: float
    tokenized: float = 0.0
    stream: LiveStream | None = None
    answer: Answer | None = None
    verdict: str = "ok"
    rendered: str = field(default="", repr=False)


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

    async def serve(self, exchange: Exchange, endpoint: str) -> None:
        """Answers one completion request, whatever its outcome, and logs one line."""
        trail = Trail(request=secrets.token_hex(12), arrived=self._clock())
        try:
            raw = await exchange.read_body(self._config.max_body_bytes, self._config.body_s)
            ask = self.read(raw, endpoint)
            async with self.watched(exchange, trail):
                prompt = await self.tokenize(ask.prompt, trail)
                stream = self.admit(ask, prompt, trail, exchange.header(b"x-baton-timeout-s"))
                await self._reply(exchange, ask, stream, trail)
        except ApiError as error:
            trail.verdict = error.code
            await self._send_error(exchange, error)
        except ClientGone as gone:
            trail.verdict = "slow_client" if gone.is_slow else "disconnect"
        finally:
            self._leave(trail)
            self._log(exchange, trail)

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
        trail.tokenized = self._clock()
        if not tokens:
            raise ApiError("invalid_request", "The prompt has no tokens.", param="prompt")
        return tokens

    def admit(
        self, ask: Ask, prompt: list[int], trail: Trail, timeout: bytes | None, explain: bool = False
    ) -> LiveStream:
        """A stream in the queue, or already on its way. Raises `ApiError`."""
        deadlines = self._find_deadlines(trail.arrived, timeout)
        sampling = self._plan_sampling(ask, len(prompt))
        admission = decide_admission(self._look_at_door())
        if isinstance(admission, ApiError):
            raise admission
        stream = LiveStream(prompt, sampling, deadlines, Marks(trail.arrived), next(self._sequence), explain)
        trail.stream = stream
        self._dispatcher.submit(stream)
        return stream

    async def _reply(self, exchange: Exchange, ask: Ask, stream: LiveStream, trail: Trail) -> None:
        stops = StopMatcher(ask.stops)
        answer = Answer(stream, self._tokenizer.make_detokenizer(), stops, stream.sampling.stop_token_ids)
        trail.answer = answer
        shape = self._make_shape(ask, trail.request)
        if ask.stream:
            await self._reply_events(exchange, ask, answer, shape, stream)
            return
        text = "".join([piece async for piece in answer.pieces()])
        assert answer.reason is not None
        await exchange.send_json(200, shape.whole(text, answer.reason, self._usage(stream, answer)))

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

    def _plan_sampling(self, ask: Ask, num_prompt: int) -> SamplingParams:
        held = pool_tokens(self._dispatcher.snapshots())
        limit = min(self._config.max_context_tokens, held or self._config.max_context_tokens)
        param = "messages" if ask.endpoint == "chat" else "prompt"
        if num_prompt >= limit:
            message = f"This model's maximum context length is {limit} tokens; your prompt alone has {num_prompt}."
            raise ApiError("context_length", message, param=param)
        room = limit - num_prompt
        if ask.max_tokens is not None and ask.max_tokens > room:
            message = (
                f"This model's maximum context length is {limit} tokens; you asked for {num_prompt} in the prompt and "
                f"{ask.max_tokens} in '{ask.max_tokens_param}'."
            )
            raise ApiError("context_length", message, param=ask.max_tokens_param)
        return SamplingParams(
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=ask.min_p,
            seed=secrets.randbits(63) if ask.seed is None else ask.seed & ((1 << 63) - 1),
            max_tokens=ask.max_tokens or min(room, ask.default_max_tokens or room),
            stop_token_ids=() if ask.ignore_eos else self._tokenizer.eos_ids,
        )

    def _find_deadlines(self, arrived: float, timeout: bytes | None) -> Deadlines:
        total_at = None
        if timeout is not None:
            try:
                seconds = float(timeout)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds <= self._config.max_total_s:
                message = (
                    f"Invalid 'x-baton-timeout-s': expected seconds over 0 and up to {self._config.max_total_s:g}."
                )
                raise ApiError("invalid_request", message, param="x-baton-timeout-s")
            total_at = arrived + seconds
        return Deadlines(arrived + self._config.first_token_s, self._config.progress_s, total_at)

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
        created, model = int(time.time()), self._config.model_id
        if ask.endpoint == "chat":
            return ChatShape(f"chatcmpl-{request}", model, created, ask.include_usage)
        return CompletionShape(f"cmpl-{request}", model, created, ask.include_usage)

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

    def _log(self, exchange: Exchange, trail: Trail) -> None:
        now, stream = self._clock(), trail.stream
        marks = stream.marks if stream is not None else Marks(trail.arrived)
        logger.info(
            "request id=%s path=%s status=%d outcome=%s stream=%s retries=%d prompt_tokens=%d output_tokens=%d tokenize_ms=%.1f"
            " queue_ms=%.1f grant_ms=%.1f ttft_ms=%.1f decode_ms=%.1f total_ms=%.1f",
            trail.request, exchange.path, exchange.status, trail.verdict, stream.id.hex()[:8] if stream else "-",
            stream.num_retries if stream else 0, stream.num_prompt if stream else 0,
            trail.answer.num_tokens if trail.answer else 0, _ms(trail.arrived, trail.tokenized),
            _ms(marks.queued, marks.dispatched),
            _ms(marks.dispatched, marks.prefill_accepted or marks.decode_accepted),
            _ms(trail.arrived, marks.first_token), _ms(marks.first_token, marks.last_token), _ms(trail.arrived, now),
        )  # fmt: skip


def _ms(begin: float, end: float) -> float:
    return max(end - begin, 0.0) * 1000 if begin and end else 0.0
