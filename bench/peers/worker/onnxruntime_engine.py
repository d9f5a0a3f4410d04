"""onnxruntime-genai on a folder of its model builder (`convert.py onnxruntime`)."""

import time

import numpy as np
import onnxruntime_genai as genai


class Engine:
    holds = False

    def __init__(self, config):
        settings = genai.Config(config["model"])
        overlay = f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {config["threads"]}}}}}}}}}'
        settings.overlay(overlay)
        self.model = genai.Model(settings)

    def info(self):
        return {"version": genai.__version__}

    def _start(self, ids, new):
        params = genai.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids) + new, min_length=len(ids) + new, do_sample=False)
        generator = genai.Generator(self.model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(ids, dtype=np.int32))
        token = self._next(generator)
        return generator, time.perf_counter() - start, token

    def _next(self, generator):
        generator.generate_next_token()
        return int(generator.get_next_tokens()[0])

    def prefill(self, ids):
        _, seconds, token = self._start(ids, 2)
        return seconds, token

    def decode(self, name, prompts, new):
        if len(prompts) != 1:
            raise NotImplementedError("only one sequence at a time")
        generator, _, token = self._start(prompts[0], new + 2)
        ids, steps = [token], []
        for _ in range(new):
            start = time.perf_counter()
            ids.append(self._next(generator))
            steps.append(time.perf_counter() - start)
        return steps, [ids]
