"""Baton: engine, scheduler and runner in one process, as a worker builds them. Run from the checkout.

The prefix cache is off, as the peers' are: prompts come again in each round.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lines import Timing, Watch, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from workers.engine.cost import MeasuredCosts
from workers.engine.engine import Engine
from workers.engine.request import Request
from workers.protocol import SamplingParams, StreamKey
from workers.replica.config import ReplicaConfig
from workers.replica.loading import load_model

BLOCK_TOKENS = 32


class Baton:
    def load(self, model: str, threads: int, mode: str, kv_dtype: str, num_blocks: int, chunk: int) -> dict[str, Any]:
        loaded = load_model(
            ReplicaConfig(
                role="decode", model_path=model, model_id="bench", secret_path="", dtype=mode, kv_dtype=kv_dtype,
                backend="native", block_tokens=BLOCK_TOKENS, num_blocks=num_blocks, chunk_tokens=chunk, max_running=32,
                max_context_tokens=min(8192, num_blocks * BLOCK_TOKENS), prefix_cache=False, num_threads=threads,
            )
        )  # fmt: skip
        torch.set_num_threads(1)
        self._runner = loaded.runner
        self._engine = Engine(loaded.engine_config, loaded.runner, costs=MeasuredCosts(loaded.costs))
        self._next_id = 0
        return {"version": "this checkout"}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        watch, streams = Watch(len(prompts)), {}
        for stream, prompt in enumerate(prompts):
            request = self._reserve(prompt, new_tokens)
            streams[request.key] = stream
            self._engine.start(request.key)
        return self._run(watch, streams)

    def do_long(self, contexts: int, context_tokens: int, new_tokens: int) -> dict[str, Any]:
        """Decode of streams that arrive with their context computed, as a decode worker adopts them. The cache is
        random numbers: values change no time, but memory never written would be read from one page."""
        watch, streams = Watch(contexts), {}
        self._fill_cache()
        for stream in range(contexts):
            request = self._reserve([1 + stream] * context_tokens, new_tokens)
            streams[request.key] = stream
            self._engine.adopt(request.key, 1)
        return self._run(watch, streams)._asdict()

    def do_weights(self) -> dict[str, Any]:
        """Bytes that one token reads and multiplications it needs: packed matrices of all layers and the head."""
        weights = self._runner.model.weights
        layers = [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)]
        return {
            "layer_bytes": sum(matrix.num_bytes for matrix in layers),
            "head_bytes": weights.head.num_bytes,
            "layer_weights": sum(matrix.shape[0] * matrix.shape[1] for matrix in layers),
            "kv_bytes_per_token": self._runner.cache.data[:, 0].nbytes // BLOCK_TOKENS,
        }

    def do_stages(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Milliseconds of the native step per stage, of the prompts and of the decode steps apart."""
        step = self._runner.model._step
        step.take_stage_ns()
        streams = {}
        for stream, prompt in enumerate(prompts):
            request = self._reserve(prompt, new_tokens)
            streams[request.key] = stream
            self._engine.start(request.key)
        phases: dict[str, dict[str, float]] = {"prompt": {}, "decode": {}}
        steps = {"prompt": 0, "decode": 0}
        while self._engine.has_work:
            started = time.perf_counter()
            result = self._engine.step()
            took_ms = (time.perf_counter() - started) * 1e3
            phase = "decode" if result.num_decodes else "prompt"
            steps[phase] += 1
            spent = {name: ns / 1e6 for name, ns in step.take_stage_ns().items()} | {
                "runner": result.step_us / 1e3, "step": took_ms
            }  # fmt: skip
            for name, ms in spent.items():
                phases[phase][name] = phases[phase].get(name, 0.0) + ms
        return {"steps": steps, "ms": phases}

    def _fill_cache(self) -> None:
        data = self._runner.cache.data
        if not bool(data[0, -1].any()):
            data.normal_()

    def _reserve(self, prompt: Sequence[int], new_tokens: int) -> Request:
        request = Request(
            key=StreamKey(self._next_id.to_bytes(16, "big"), 0), known=list(prompt), num_prompt=len(prompt),
            sampling=SamplingParams(max_tokens=new_tokens), arrival=time.monotonic(),
        )  # fmt: skip
        self._next_id += 1
        if not self._engine.reserve(request, self._engine.config.pages_for(len(prompt) + new_tokens)):
            raise MemoryError("the pool of the bench is too small")
        return request

    def _run(self, watch: Watch, streams: dict[StreamKey, int]) -> Timing:
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                watch.saw(streams[output.key], [output.token])
        return watch.done()


if __name__ == "__main__":
    serve(Baton())
