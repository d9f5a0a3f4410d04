"""FLOPs and bytes of one forward pass, from the sizes alone. A test holds it to the sum of the contract's op costs."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.attention import visible_keys, visible_pairs
from ..kv_cache import PagedKVCache
from ..models.decoder import Decoder


class StepCost:
    """`cost(counts, contexts, logit_rows)`: `counts[i]` new tokens of a sequence that then holds `contexts[i]`.

    FLOPs are those of the matrices and of attention (causal halved). Bytes are what must cross memory once: every
    matrix that is touched, the rows of the embedding, keys and values read and written. Activations stay in caches.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache) -> None:
        config = decoder.config
        layers = [w for layer in decoder.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self._layer_bytes = sum(w.nbytes for w in layers)
        self._layer_flops = sum(2 * w.shape[0] * w.shape[1] for w in layers)
        self._head_bytes = decoder.head.nbytes
        self._head_flops = 2 * decoder.head.shape[0] * decoder.head.shape[1]
        self._embedding_row_bytes = decoder.embedding.nbytes / config.vocab_size
        self._kv_token_bytes = cache.bytes_per_token
        self._pair_flops = 4 * config.num_layers * config.num_heads * config.head_dim
        self._window = decoder.window[0]

    def __call__(self, counts: Sequence[int], contexts: Sequence[int], logit_rows: int) -> tuple[float, float]:
        """(FLOPs, bytes) of the step."""
        tokens = sum(counts)
        pairs = sum(visible_pairs(n, c, True, self._window, 0) for n, c in zip(counts, contexts, strict=True))
        keys = sum(visible_keys(n, c, self._window) for n, c in zip(counts, contexts, strict=True))
        flops = tokens * self._layer_flops + logit_rows * self._head_flops + pairs * self._pair_flops
        head = self._head_bytes if logit_rows else 0
        nbytes = self._layer_bytes + head + tokens * self._embedding_row_bytes + (keys + tokens) * self._kv_token_bytes
        return float(flops), float(nbytes)
