"""pykernels itself, through its generator's engine. Config: "kv" ("bfloat16" or "int8"), "cache_tokens"."""

import time

import torch

import pykernels
from pykernels import native
from pykernels.generator import Generator, SamplingParams
from pykernels.generator.graph import ModelStep
from pykernels.models.decoder import Buffers
from pykernels.roofline.points import Recorder

LONGEST = 1 << 20  # new tokens that a held prompt may be continued by: a request that is never done


class Engine:
    holds = True

    def __init__(self, config):
        self.config = config
        self.generator = Generator.from_pretrained(
            config["model"], kv=config["kv"], threads=config["threads"], cache_tokens=config["cache_tokens"]
        )
        self.engine, self.held = self.generator.engine, {}
        self.extra = {}  # what a reply says besides: what the phase's steps cost, and their seconds inside kernels

    def info(self):
        cache = self.engine.cache
        return {
            "version": pykernels.__version__,
            "torch": torch.__version__,
            "level": native.chosen_level(),
            "kv": self.config["kv"],
            "weights_bytes": self.generator.decoder.weight_bytes,
            "kv_bytes": cache.nbytes,
            "kv_bytes_per_token": cache.bytes_per_token,
        }

    def prefill(self, ids):
        self.engine.steps.clear()
        start = time.perf_counter()
        request = self._request(ids, 1)
        for _ in self.generator.pieces(request):
            pass
        seconds = time.perf_counter() - start
        self._note(1)
        return seconds, request.output_ids[0]

    def _note(self, passes):
        steps = self.engine.steps
        self.extra = {
            "flops": sum(s.flops for s in steps) / passes,
            "bytes": sum(s.bytes for s in steps) / passes,
            "kernel_share": sum(s.kernel_seconds for s in steps) / sum(s.seconds for s in steps),
        }

    def _request(self, ids, new):
        return self.generator.request(ids, SamplingParams(max_new_tokens=new, ignore_eos=True))

    def hold(self, name, prompts):
        requests = [self._request(ids, LONGEST) for ids in prompts]
        for request in requests:
            request.sequence = self.engine.cache.add_sequence()
            for _ in self.engine.prefill([request]):
                pass
        self.held[name] = requests

    def _drop(self, name):
        for request in self.held.pop(name):
            self.engine.cache.free(request.sequence)

    def decode(self, name, prompts, new):
        if prompts is not None:
            self.hold(name, prompts)
        requests, steps = self.held[name], []
        self.engine.steps.clear()
        for _ in range(new):
            start = time.perf_counter()
            for _ in self.engine.decode(requests):
                pass
            steps.append(time.perf_counter() - start)
        self._note(new)
        ids = [request.output_ids[: new + 1] for request in requests]
        if prompts is not None:
            self._drop(name)
        else:
            for request in requests:
                del request.output_ids[1:]
                self.engine.cache.truncate(request.sequence, len(request.prompt_ids))
        return steps, ids

    def logits(self, ids, phase):
        return (self.engine.logits(ids) if phase == "prefill" else self._decoded(ids)).numpy()

    def _decoded(self, ids):
        """Logits with every token through the decode phase."""
        engine, decoder = self.engine, self.generator.decoder
        buffers = Buffers(decoder.config, decoder.precision, 1, 1)
        step = ModelStep(decoder, engine.cache, buffers, "decode", (1, 1), engine.use_plan)
        sequence, rows = engine.cache.add_sequence(), []
        for position, token in enumerate(ids):
            step.inputs.ids[0], step.inputs.positions[0] = token, position
            step.inputs.slot_mapping.copy_(engine.cache.append(sequence, 1))
            engine.cache.write_tables([sequence], step.inputs.block_table, step.inputs.seqlens_k)
            step.run()
            rows.append(buffers.logits.clone())
        engine.cache.free(sequence)
        return torch.cat(rows)

    def parts(self, ids):
        """Seconds and FLOPs per op of a prefill, each call timed on its own."""
        self.engine.recorder = recorder = Recorder()
        try:
            self.prefill(ids)
        finally:
            self.engine.recorder = None
        found: dict[str, dict[str, float]] = {}
        for (phase, op, *_), calls in recorder.groups.items():
            if phase == "prefill":
                entry = found.setdefault(op, {"seconds": 0.0, "flops": 0.0})
                entry["seconds"] += sum(call.seconds for call in calls)
                entry["flops"] += sum(call.cost.flops for call in calls)
        return found
