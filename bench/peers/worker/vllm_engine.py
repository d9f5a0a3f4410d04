"""vLLM on the CPU, its engine stepped in this process so that steps are tokens (`convert.py folder`). Config: "dtype"."""

import os
import time
from itertools import pairwise

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm


class Engine:
    holds = False

    def __init__(self, config):
        options = vllm.EngineArgs(
            model=config["model"],
            dtype=config["dtype"],
            max_model_len=config["context"],
            max_num_seqs=32,
            max_num_batched_tokens=max(2048, config["context"]),
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        self.engine, self.number = vllm.LLMEngine.from_engine_args(options), 0
        self.config = config

    def info(self):
        return {"version": vllm.__version__, "dtype": self.config["dtype"]}

    def _generate(self, prompts, new):
        options = vllm.SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        start, times, outputs = time.perf_counter(), [], {}
        for ids in prompts:
            self.number += 1
            self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, options)
        while self.engine.has_unfinished_requests():
            done = self.engine.step()
            if done:
                times.append(time.perf_counter())
                outputs.update({o.request_id: list(o.outputs[0].token_ids) for o in done})
        return start, times, [outputs[name] for name in sorted(outputs, key=int)]

    def prefill(self, ids):
        start, times, tokens = self._generate([ids], 1)
        return times[0] - start, tokens[0][0]

    def decode(self, name, prompts, new):
        if len(prompts) != 1:
            raise NotImplementedError("only one sequence at a time")
        _, times, tokens = self._generate(prompts, new + 1)
        return [b - a for a, b in pairwise(times)], tokens
