"""transformers on torch, from the same GGUF, dequantised. Config: "dtype" ("bfloat16" or "float32")."""

import os
import time

import torch
import transformers


class Engine:
    holds = True

    def __init__(self, config):
        torch.set_num_threads(config["threads"])
        folder, file = os.path.split(config["model"])
        self.config, self.held = config, {}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=getattr(torch, config["dtype"]), attn_implementation="sdpa"
        ).eval()

    def info(self):
        versions = {"version": transformers.__version__, "torch": torch.__version__}
        return {**versions, "dtype": self.config["dtype"], "attention": "sdpa"}

    @torch.inference_mode()
    def _forward(self, ids, cache=None, keep=1):
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return out.logits, out.past_key_values

    def prefill(self, ids):
        prompt = torch.tensor([ids])
        start = time.perf_counter()
        logits, _ = self._forward(prompt)
        token = int(logits[0, -1].argmax())
        return time.perf_counter() - start, token

    def hold(self, name, prompts):
        if len(prompts) != 1:
            raise NotImplementedError("only one sequence at a time")
        logits, cache = self._forward(torch.tensor(prompts))
        self.held[name] = (cache, len(prompts[0]), logits[:, -1].argmax(-1, keepdim=True))

    def decode(self, name, prompts, new):
        if prompts is not None:
            self.hold(name, prompts)
        cache, length, token = self.held[name]
        ids, steps = [int(token)], []
        for _ in range(new):
            start = time.perf_counter()
            logits, cache = self._forward(token, cache)
            token = logits[:, -1].argmax(-1, keepdim=True)
            ids.append(int(token))
            steps.append(time.perf_counter() - start)
        if prompts is None:
            cache.crop(length)
        else:
            del self.held[name]
        return steps, [ids]

    def logits(self, ids, phase):
        if phase != "prefill":
            raise NotImplementedError("only the prefill phase")
        return self._forward(torch.tensor([ids]), keep=0)[0][0].float().numpy()
