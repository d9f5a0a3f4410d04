"""How byte-level BPE vocabularies cut text into words before merging, by the name in `tokenizer.ggml.pre`.

A vocabulary's merges were learned on words cut in one certain way; another way gives other ids without any error, so an
unknown name is refused. The patterns are those of each model's own tokenizer.json; the names are llama.cpp's.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
LLAMA3 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # numbers in groups of three
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied one after the other: each cuts the pieces that the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as a whole is taken as it is
    adds_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2, _DIGITS = PreTokenizer((GPT2,)), PreTokenizer((DIGIT, GPT2))
_LLAMA3, _QWEN2 = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True), PreTokenizer((QWEN2,))

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
}
