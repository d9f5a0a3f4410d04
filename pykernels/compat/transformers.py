"""transformers with our attention: `register()`, then `attn_implementation="pykernels"`.

    from pykernels.compat.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="pykernels")

Both parts are registered, the attention and its mask function (`transformers_mask`); without the second transformers
passes no mask at all. Keys and values stay where the cache has them: contiguous rows are read as ragged sequences, whose
gaps are sequences without queries, or as pages through a block table. Nothing is copied or expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ..native import BACKEND, share_torch_threads
from ..ops.decode import paged_decode_attention
from ..ops.prefill import prefill_attention
from .transformers_mask import Band, Pages, Runs, Segments, Table, Visibility, table_of, visible_keys

NAME = "pykernels"

# Lengths of sequences packed one after another, and the paged cache of continuous batching: all need `cu_seq_lens_q`.
LENGTHS = (("cu_seq_lens_k",), ("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k"))  # by either name
PACKED = frozenset([*(name for names in LENGTHS for name in names), "cache", "read_index", "write_index"])

# What transformers passes along that does not bear on attention once the mask is known.
NEUTRAL = frozenset(
    [
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "layer_idx",
        "deterministic",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "shift_labels",
        "ignore_index",
        "seq_idx",
        "logits_to_keep",
        "logits_indices",
        "logits_processor_args",
        "return_dict",
    ]
)


def register(name: str = NAME, *, continuous_batching: bool = False, torch_threads: bool = True) -> str:
    """Makes `attn_implementation=name` a choice in transformers; calling it again changes nothing.

    Args:
        name: what to call it.
        continuous_batching: give it a name that `generate_batch` accepts: transformers 5 knows its paged attentions by
            the word "flash", and would look for a package of that name unless told that it is loaded.
        torch_threads: run the CPU backend on torch's threads (`native.share_torch_threads`), since those of the model's
            other ops keep the cores busy.

    Returns:
        The name to set: `name`, or with continuous batching, on transformers 5, `name + "_flash"`.
    """
    if continuous_batching and hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn"):
        name += "_flash"
        flash_attention: Any = modeling_flash_attention_utils
        flash_attention._loaded_implementation = name
    if torch_threads and not BACKEND.unavailable():
        share_torch_threads()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, visible_keys)
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The entry of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `is_causal` counts where neither a mask nor `is_causal` is given.
        query: `[batch, num_heads, queries, head_dim]` float32, float16 or bfloat16.
        key, value: `[batch, num_kv_heads, keys, head_dim]`, from the cache where there is one.
        attention_mask: what `visible_keys` made, or a bool or 0 / -inf float mask `[batch, 1, queries, keys]`.
        scaling: of the logits; `1 / sqrt(head_dim)` when None.
        is_causal: read where no mask was made, as for sdpa.
        sliding_window: tokens that a query sees, itself included; must agree with what `visible_keys` made, and does
            not count beside a mask of the caller's own (as in eager and sdpa).
        softcap: `softcap * tanh(logit / softcap)`.
        s_aux: `[num_heads]` sinks, one more logit per head in the denominator.
        others: `cu_seq_lens_q` with `PACKED` for packed sequences and for continuous batching; names in `NEUTRAL`;
            anything else must be None.

    Returns:
        `([batch, queries, num_heads, head_dim], None)`.

    Raises:
        NotImplementedError: dropout, attention weights, a bias, or an argument that is not known.
        ValueError: sizes or options that contradict each other; what the ops refuse.
    """
    _refuse(dropout, others)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.detach().to(torch.float32),
    }
    if others.get("cu_seq_lens_q") is not None:
        if isinstance(attention_mask, (Table, torch.Tensor)) or getattr(attention_mask, "padded", False):
            raise ValueError("pykernels: cu_seq_lens_q and a padding mask contradict each other; give one of them")
        return _packed(module, query, key, value, causal, sliding_window, options, others), None
    if attention_mask is None:
        attention_mask = _unmasked(query, key, causal, sliding_window)
    elif isinstance(attention_mask, torch.Tensor):
        attention_mask = table_of(_as_bool(attention_mask, query, key))
    _agree(attention_mask, query, key, sliding_window)

    batch, heads, queries, _ = query.shape
    if isinstance(attention_mask, Pages):
        out = _over_pages(attention_mask, query, key, value, options)
    elif isinstance(attention_mask, Table):
        out = _over_table(attention_mask, query, key, value, options)
    else:
        out = _over_runs(attention_mask, query, key, value, options)
    return out.view(batch, queries, heads, value.shape[-1]), None


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"pykernels: attention has no dropout, got dropout={dropout}; call model.eval()")
    if others.pop("output_attentions", False):
        raise NotImplementedError(
            'pykernels: output_attentions: weights are never made; use attn_implementation="eager"'
        )
    packed = others.get("cu_seq_lens_q") is not None
    for name, given in others.items():
        if given is None or name in NEUTRAL or name == "cu_seq_lens_q":
            continue
        if name not in PACKED:
            raise NotImplementedError(f"pykernels: attention does not know the argument {name}, got {type(given)}")
        if not packed:
            raise ValueError(f"pykernels: {name} needs cu_seq_lens_q, where each packed sequence begins")
    missing = [names[0] for names in LENGTHS if all(others.get(name) is None for name in names)] if packed else []
    if missing:
        raise ValueError(f"pykernels: cu_seq_lens_q needs {', '.join(missing)}")


def _unmasked(query: torch.Tensor, key: torch.Tensor, causal: bool, sliding_window: int | None) -> Visibility:
    """What a layer sees that was given no mask: everything, or itself and what comes before."""
    queries, keys = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window < keys:
        raise ValueError(f"pykernels: sliding_window={sliding_window} needs a mask, got none for {keys} keys")
    if causal and queries not in (1, keys):
        raise ValueError(f"pykernels: where do {queries} causal queries stand among {keys} keys? Give a mask")
    return visible_keys(
        query.shape[0],
        queries,
        keys,
        q_offset=keys - queries if causal else 0,
        mask_function=_causal if causal and queries > 1 else _everything,
        device=query.device,
        allow_is_causal_skip=True,
    )


def _causal(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def _everything(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return q >= 0


def _as_bool(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask of the caller's own, as bool `[batch, 1, queries, keys]`."""
    expected = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask.dim() != 4:
        raise ValueError(f"pykernels: attention_mask must have shape {list(expected)}, got {list(mask.shape)}")
    mask = mask[..., : key.shape[2]].expand(expected[0], -1, *expected[2:])
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min if mask.is_floating_point() else torch.zeros_like(shown)
    if torch.compiler.is_compiling():
        torch._assert_async((shown | hidden).all(), "pykernels: attention_mask must be 0 or -inf")
    elif not (shown | hidden).all():
        raise NotImplementedError("pykernels: attention_mask must be bool, or 0 where visible and -inf elsewhere")
    return shown


def _agree(mask: Visibility, query: torch.Tensor, key: torch.Tensor, sliding_window: int | None) -> None:
    if mask.kv_length != key.shape[2]:
        raise ValueError(f"pykernels: the mask is for {mask.kv_length} keys, got {key.shape[2]}")
    if isinstance(mask, Runs) and mask.q_length != query.shape[2]:
        raise ValueError(f"pykernels: the mask is for {mask.q_length} queries, got {query.shape[2]}")
    if sliding_window is None or isinstance(mask, Table) or mask.band.right is None or sliding_window >= key.shape[2]:
        return
    if mask.band.left != sliding_window - (mask.band.right == 0):
        raise ValueError(f"pykernels: sliding_window={sliding_window}, but the mask was made with {mask.band}")


# ---- where the keys lie ---------------------------------------------------------------------------------------------
def _row_step(x: torch.Tensor) -> int:
    """Rows of `_rows(x)` from one sequence to the next; 0 when `x` cannot be seen as rows."""
    batch, _, tokens, _ = x.shape
    if x.stride(3) != 1 or (tokens > 1 and x.stride(2) == 0):
        return 0
    if batch == 1 or tokens == 1:
        return tokens if batch == 1 else 0
    return x.stride(0) // x.stride(2) if x.stride(0) % x.stride(2) == 0 else 0


def _rows(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """`[batch, heads, tokens, dim]` seen as `[rows, heads, dim]`, and the rows from one sequence to the next.

    Where tokens are adjacent within a head, rows of different heads overlap in memory; nothing is copied unless a
    sequence does not begin at a multiple of the distance between tokens, or several are compiled.
    """
    if torch.compiler.is_compiling():  # a compiler may lay a tensor out anew, which as_strided would not notice
        return _flat(key), _flat(value), key.shape[2]
    step = _row_step(key)
    if step == 0 or step != _row_step(value):
        key, value = key.contiguous(), value.contiguous()
        step = key.shape[1] * key.shape[2] if key.shape[0] > 1 else key.shape[2]
    batch, _, tokens, _ = key.shape
    rows = (batch - 1) * step + tokens

    def seen(x: torch.Tensor) -> torch.Tensor:
        token = x.shape[3] if x.shape[2] == 1 else x.stride(2)
        return x.as_strided((rows, x.shape[1], x.shape[3]), (token, x.stride(1), 1))

    return seen(key), seen(value), step


# ---- the four kinds of visibility -----------------------------------------------------------------------------------
def _flat(query: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, queries, dim]` -> `[batch * queries, heads, dim]`."""
    if query.shape[2] == 1:
        return query.squeeze(2)
    return query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])


def _window(band: Band) -> dict[str, Any]:
    left, right = band.window
    return {"causal": True, "window_size": (left, 0)} if right == 0 else {"causal": False, "window_size": (left, right)}


def _over_runs(
    mask: Runs | Segments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    queries = query.shape[2]
    if isinstance(mask, Segments):
        k, v = _flat(key), _flat(value)
        cu_q = cu_k = mask.cu_seqlens
        longest_q, longest_k = mask.longest, mask.longest
    else:
        k, v, step = _rows(key, value)
        cu_q, cu_k = mask.starts(step)
        longest_q, longest_k = queries, k.shape[0]
    q, rest = _flat(query), {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k, **options}
    out: Any = prefill_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **_window(mask.band), **rest)
    if isinstance(mask, Runs):
        for cu_q, cu_k, left in mask.late_parts(step):  # other queries see no key there, which gives 0
            late: Any = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "window_size": (left, -1), "causal": False}
            out += prefill_attention(q, k, v, **late, **rest)
    return out


def _over_pages(
    mask: Pages, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    out: Any = paged_decode_attention(
        _flat(query),
        key.transpose(1, 2),
        value.transpose(1, 2),
        block_table=mask.rows,
        seqlens_k=mask.seqlens,
        **_window(mask.band),
        **options,
    )
    return out


def _over_table(
    mask: Table, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    k, v, step = _rows(key, value)
    out: Any = paged_decode_attention(
        _flat(query),
        k[:, None],  # pages of one token
        v[:, None],
        block_table=mask.rows(query.shape[0], step),
        seqlens_k=mask.seqlens,
        causal=False,
        **options,
    )
    return out


def _packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
    others: dict[str, Any],
) -> torch.Tensor:
    """Sequences one after another, as `cu_seq_lens_q` and `cu_seq_lens_k` say."""
    if others.get("cache") is not None:  # continuous batching of 4.x: the layer leaves the update of its cache to us
        k, v = others["cache"].update(key, value, module.layer_idx, **others)
    else:
        k, v = _flat(key), _flat(value)
    cu_q, cu_k = others["cu_seq_lens_q"], others["cu_seq_lens_k"]
    lengths: Any = (others.get(f"max_length_{x}", others.get(f"max_seqlen_{x}")) for x in "qk")
    longest_q, longest_k = lengths
    if isinstance(cu_k, dict):
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        cu_k, longest_k = cu_k[kind], longest_k[kind]
    left = -1 if sliding_window is None else sliding_window - 1
    out: Any = prefill_attention(
        _flat(query),
        k,
        v,
        cu_seqlens_q=cu_q.to(torch.int32),
        cu_seqlens_k=cu_k.to(torch.int32),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        causal=causal,
        window_size=(left, 0 if causal else left),
        **options,
    )
    return out.view(query.shape[0], query.shape[2], query.shape[1], v.shape[-1])
