"""Text to token ids and back, from the tokenizer that a model file carries.

Encoding is done by `tokenizers`; decoding is ours and goes through bytes, so that streamed text (`streaming.py`) and
text decoded at once are the same text: a token stands for bytes, and characters appear when their bytes are complete.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models

from .errors import ModelFileError
from .gguf_file import GGUFFile
from .pretokenize import PRE_TOKENIZERS

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
KNOWN_MODELS = ("gpt2",)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A byte-level BPE tokenizer.

    `special_ids` are the control tokens: recognised in text when asked, and left out of decoded text. `tokens` has each
    token in the file's spelling.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: Iterable[int], bos_id: int | None, add_bos: bool
    ) -> None:
        self.backend = backend
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id if add_bos else None
        added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}  # spelt as plain text
        self._alphabet = byte_alphabet()

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the file's spelling, None if there is no such token."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the begin-of-sequence token in front if the model wants one (not for rendered chats: a
        template writes it itself). With `parse_special`, control tokens written out in the text (`<|im_start|>`) become
        their ids, else they are ordinary characters. A character that the vocabulary cannot spell is left out, as by
        every other reader of such a file (SmolLM2 has no token for six of the control characters).
        """
        backend = self.backend if parse_special else self._literal_backend
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_special and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD."""
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that one token stands for; none for control tokens unless `skip_special` is False.

        Raises `ValueError` for an id outside the vocabulary.
        """
        if skip_special and token_id in self.special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
            if token is None:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
            known = self._bytes[token_id] = self._spelt_bytes(token)
        return known

    def _spelt_bytes(self, token: str) -> bytes:
        if any(character not in self._alphabet for character in token):
            return token.encode()
        return bytes(self._alphabet[character] for character in token)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy for which control tokens in the text are ordinary characters."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = True
        return copy


def tokenizer_from_gguf(file: GGUFFile, *, bos_id: int | None, add_bos: bool) -> Tokenizer:
    """The tokenizer in a GGUF's metadata; raises `ModelFileError` if it is of an unknown kind or damaged."""
    kind = file.require("tokenizer.ggml.model", str)
    if kind not in KNOWN_MODELS:
        raise ModelFileError(file.path, f"unknown tokenizer model {kind!r}; known: {', '.join(KNOWN_MODELS)}")
    pre = file.require("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ModelFileError(file.path, f"unknown pre-tokenizer {pre!r}; known: {', '.join(PRE_TOKENIZERS)}")
    tokens = file.require("tokenizer.ggml.tokens", list)
    types = file.require("tokenizer.ggml.token_type", np.ndarray)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocab) != len(tokens):
        problem = f"corrupt vocabulary: {len(tokens)} tokens, {len(vocab)} different ones, {len(types)} types"
        raise ModelFileError(file.path, problem)
    backend = tokenizers.Tokenizer(_bpe(file, vocab, PRE_TOKENIZERS[pre].ignore_merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre].build()
    special = [i for i, t in enumerate(types) if t in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == USER_DEFINED])
    return Tokenizer(backend, special, bos_id, add_bos)


def _bpe(file: GGUFFile, vocab: dict[str, int], ignore_merges: bool) -> models.BPE:
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelFileError(
                file.path, f"corrupt vocabulary: the merge {' '.join(merge)[:64]!r} is not of two known tokens"
            )
    return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)


def tokenizer_from_json(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, which must be byte-level BPE; raises `ModelFileError`."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # the Rust side raises plain Exception, whatever is wrong with the file
        raise ModelFileError(path, f"not a tokenizer: {error}") from None
    decoders = _named_parts(document.get("decoder"), "decoders")
    if document["model"].get("type") != "BPE" or "ByteLevel" not in decoders:
        raise ModelFileError(path, f"unknown tokenizer model {document['model'].get('type')!r}; known: byte-level BPE")
    special = [t["id"] for t in document.get("added_tokens", []) if t["special"]]
    with_bos = backend.encode("", add_special_tokens=True).ids  # what its post-processor puts around an empty text
    bos_id = with_bos[0] if with_bos else None
    return Tokenizer(backend, special, bos_id, add_bos=bos_id is not None)


def _named_parts(part: dict[str, Any] | None, list_name: str) -> set[str]:
    """The `type` of a part of tokenizer.json, or those of the parts of a Sequence."""
    parts = (part or {}).get(list_name, [part or {}])
    return {str(p.get("type")) for p in parts}
