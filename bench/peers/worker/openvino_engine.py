"""OpenVINO GenAI, which reads the GGUF itself. It keeps a prefix cache: a prompt must never begin as an earlier one did."""

import time
from itertools import pairwise

import numpy as np
import openvino as ov
import openvino_genai as genai


class Clock(genai.StreamerBase):
    """Notes when each token was handed over."""

    def __init__(self):
        super().__init__()
        self.times, self.ids = [], []

    def write(self, token):
        self.times.append(time.perf_counter())
        self.ids += list(token) if isinstance(token, (list, tuple)) else [token]
        return genai.StreamingStatus.RUNNING

    def end(self):
        pass


class Engine:
    holds = False

    def __init__(self, config):
        self.pipeline = genai.LLMPipeline(config["model"], "CPU", INFERENCE_NUM_THREADS=config["threads"])

    def info(self):
        return {"version": genai.__version__, "openvino": ov.__version__}

    def _generate(self, ids, new):
        prompt = np.array([ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
        options = genai.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = new
        options.ignore_eos, options.do_sample, options.apply_chat_template = True, False, False
        clock = Clock()
        start = time.perf_counter()
        self.pipeline.generate(inputs, options, clock)
        return start, clock

    def prefill(self, ids):
        start, clock = self._generate(ids, 1)
        return clock.times[0] - start, clock.ids[0]

    def decode(self, name, prompts, new):
        if len(prompts) != 1:
            raise NotImplementedError("only one sequence at a time")
        _, clock = self._generate(prompts[0], new + 1)
        times = clock.times
        return [b - a for a, b in pairwise(times)], [clock.ids]
