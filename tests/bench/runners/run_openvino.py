"""openvino-genai: its continuous batching pipeline over a GGUF file, scheduler included."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import Timing, Watch, serve


class OpenVINO:
    def load(self, model: str, threads: int) -> dict[str, Any]:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 32
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._next_id = 0
        return {"version": genai.__version__}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = new_tokens, True, False
        wanted.apply_chat_template = False
        watch, handles = Watch(len(prompts)), []
        for prompt in prompts:
            ids = ov.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._next_id, ids, wanted))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for stream, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        watch.saw(stream, output.generated_ids)
        return watch.done()


serve(OpenVINO())
