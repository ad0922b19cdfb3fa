"""llama.cpp through the low-level calls of llama-cpp-python: one decode call a step. A bare loop."""

from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np
from lines import Timing, Watch, serve

MAX_STREAMS = 16
BATCH_TOKENS = 1024
CONTEXT_TOKENS = MAX_STREAMS * 512


class LlamaCpp:
    def load(self, model: str, threads: int) -> dict[str, Any]:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = (
            CONTEXT_TOKENS,
            BATCH_TOKENS,
            MAX_STREAMS,
            True,
        )
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        system = llama.llama_print_system_info().decode()
        return {"version": llama.__version__, "built": system}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        watch, last = Watch(len(prompts)), {}
        flat = [
            (token, at, stream, at == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        for first in range(0, len(flat), BATCH_TOKENS):
            last.update(self._step(flat[first : first + BATCH_TOKENS], watch))
        for step in range(new_tokens - 1):
            rows = [(last[n], len(prompt) + step, n, True) for n, prompt in enumerate(prompts)]
            last = self._step(rows, watch)
        return watch.done()

    def _step(self, rows: Sequence[tuple[int, int, int, bool]], watch: Watch) -> dict[int, int]:
        """Decode (token, position, stream, wants logits) rows; the greedy token of each stream that wants one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_wanted
            batch.seq_id[i][0] = stream
        if code := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        chosen = {}
        for i, (_, _, stream, is_wanted) in enumerate(rows):
            if is_wanted:
                logits = llama.llama_get_logits_ith(self._context, i)
                chosen[stream] = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
                watch.saw(stream, [chosen[stream]])
        return chosen


serve(LlamaCpp())
