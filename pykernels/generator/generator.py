"""`Generator`: a model on disk made ready to generate text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import native
from ..kv_cache import PagedKVCache
from ..models.checkpoint import Checkpoint, load_checkpoint
from ..models.decoder import EXACT, LANE_BACKENDS, Decoder, Precision
from .engine import CHUNK, Engine
from .request import Completion, Request, SamplingParams

PAGE_SIZE = 64  # tokens; a page of one layer's K and V fits the L2 cache, where the next one is fetched ahead
COMPUTE = ("auto", "float32")


class Generator:
    """Generates text with one model. `generate` returns when all is done, `stream` yields text as it comes."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder, engine: Engine) -> None:
        self.checkpoint, self.decoder, self.engine = checkpoint, decoder, engine
        self.config, self.tokenizer = checkpoint.config, checkpoint.tokenizer

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        backend: str = "auto",
        kv: str = "auto",
        weights: str = "auto",
        compute: str = "auto",
        threads: int | None = None,
        max_batch: int = 32,
        cache_tokens: int | None = None,
        chunk: int = CHUNK,
    ) -> Generator:
        """Loads and packs a model.

        Args:
            name_or_path: "smollm2", a GGUF file, or a Hugging Face folder.
            backend: "auto" or the name of one backend for every op.
            kv: format of the KV cache: "auto" (the compute type), "float32", "bfloat16", "int8" or "fp8_e4m3".
            weights: "auto" keeps the file's format, or what to convert to.
            compute: "auto" keeps K and V in bfloat16 and, on the CPU, quantises activations in front of quantised weights;
                "float32" quantises nothing (with weights="float32" and kv="auto": the model as its authors trained it).
            threads: size of the CPU thread team; the CPUs of this process when None.
            max_batch: most requests that run at once.
            cache_tokens: tokens that the KV cache holds; twice the model's context when None.
            chunk: prompt tokens per prefill step.

        Raises:
            ValueError: an option or file that cannot be, in one line.
        """
        if compute not in COMPUTE:
            raise ValueError(f"compute must be one of {', '.join(COMPUTE)}, got {compute!r}")
        if threads is not None:
            native.module().set_num_threads(threads)
        activations = "int8" if backend in LANE_BACKENDS else "float"
        precision = EXACT if compute == "float32" else Precision(activations=activations)
        precision = replace(precision, weights=weights)
        if kv in ("float32", "bfloat16", "float16"):
            precision = replace(precision, attention=getattr(torch, kv))
        checkpoint = load_checkpoint(name_or_path)
        config = checkpoint.config
        decoder = Decoder(config, checkpoint.weights, precision, backend)
        tokens = 2 * config.max_context if cache_tokens is None else cache_tokens
        cache = PagedKVCache(
            num_pages=max(1, -(-tokens // PAGE_SIZE)),
            page_size=PAGE_SIZE,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kv if kv in ("int8", "fp8_e4m3") else precision.attention,
        )
        return cls(checkpoint, decoder, Engine(decoder, cache, max_batch=max_batch, chunk=chunk))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation through the model's chat template."""
        template = self.checkpoint.chat_template
        if template is None:
            raise ValueError("the model has no chat template: give it a plain prompt")
        return self.tokenizer.encode(template.render_chat(messages), add_special=False)

    def request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """A request for a prompt, text or token ids."""
        submitted = time.perf_counter()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.config.vocab_size}")
        return Request(ids, params, self.tokenizer, self.config.eos_ids, submitted=submitted)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues every prompt; one `SamplingParams` for all, or one each.

        The same request gives the same tokens alone and in any batch.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list; for one prompt pass [prompt]")
        params = SamplingParams() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        requests = [self.request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for _ in self._run(requests):
            pass
        return [r.completion() for r in requests]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The continuation of one prompt, piece by piece: whole characters, and never part of a stop string."""
        yield from self.pieces(self.request(prompt, params or SamplingParams()))

    def pieces(self, request: Request) -> Iterator[str]:
        """The same for a request made before, which then holds its tokens, text and times."""
        for _, piece in self._run([request]):
            if piece:
                yield piece

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        try:
            for request in requests:
                self.engine.submit(request)
            yield from self.engine.run()
        finally:
            self.engine.cancel()
