"""CTranslate2 on a folder of its converter (`convert.py ctranslate2`). Config: "compute" ("int8", "float32")."""

import json
import os
import time
from itertools import pairwise

import ctranslate2


class Engine:
    holds = False

    def __init__(self, config):
        self.config = config
        self.generator = ctranslate2.Generator(
            config["model"],
            device="cpu",
            compute_type=config["compute"],
            inter_threads=1,
            intra_threads=config["threads"],
        )
        with open(os.path.join(config["model"], "vocabulary.json")) as file:
            self.words = json.load(file)

    def info(self):
        return {"version": ctranslate2.__version__, "compute": self.generator.compute_type}

    def _generate(self, ids, new):
        times, tokens = [], []

        def step(result):
            times.append(time.perf_counter())
            tokens.append(result.token_id)
            return False

        start = time.perf_counter()
        self.generator.generate_batch(
            [[self.words[i] for i in ids]],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=step,
            end_token=[],
        )
        return start, times, tokens

    def prefill(self, ids):
        start, times, tokens = self._generate(ids, 1)
        return times[0] - start, tokens[0]

    def decode(self, name, prompts, new):
        if len(prompts) != 1:
            raise NotImplementedError("only one sequence at a time")
        _, times, tokens = self._generate(prompts[0], new + 1)
        return [b - a for a, b in pairwise(times)], [tokens]
