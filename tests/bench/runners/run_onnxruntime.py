"""onnxruntime-genai: a model of its own builder, 4-bit weights and head in groups of 32. A bare loop."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from lines import Timing, Watch, serve

NO_EOS = 49151
"""The last token of the vocabulary stands in for the end of sequence: greedy text does not meet it."""


class OnnxRuntime:
    def load(self, model: str, threads: int) -> dict[str, Any]:
        config = genai.Config(model)
        session = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"eos_token_id": NO_EOS, "decoder": session}}))
        self._model = genai.Model(config)
        return {"version": genai.__version__}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(prompts[0]) + new_tokens, batch_size=len(prompts), do_sample=False)
        watch = Watch(len(prompts))
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
            for stream, token in enumerate(generator.get_next_tokens()):
                watch.saw(stream, [token])
        return watch.done()


serve(OnnxRuntime())
