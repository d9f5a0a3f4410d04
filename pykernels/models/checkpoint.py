"""Everything that a file says about a model, in one object."""

from dataclasses import dataclass, field
from pathlib import Path

from .chat import ChatTemplate
from .config import ModelConfig, config_from_gguf
from .errors import ModelFileError
from .gguf_file import GGUFFile
from .hf_folder import HFFolder
from .locate import resolve_model
from .tokenizer import Tokenizer, tokenizer_from_gguf
from .weights import ModelWeights, weights_from_gguf


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, ready to be packed for a backend; no weight has been read yet."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    weights: ModelWeights = field(repr=False)


def load_checkpoint(name_or_path: str | Path) -> Checkpoint:
    """Opens a model by name ("smollm2"), GGUF file, or Hugging Face folder.

    Raises `ValueError` (mostly `ModelFileError`) with one line for everything that can be wrong with it.
    """
    path = resolve_model(name_or_path)
    if path.is_dir():
        folder = HFFolder(path)
        return Checkpoint(path, folder.config, folder.tokenizer, folder.chat_template, folder.weights())
    file = GGUFFile(path)
    config = config_from_gguf(file)
    weights = weights_from_gguf(file, config)
    tokenizer = tokenizer_from_gguf(file, bos_id=config.bos_id, add_bos=config.add_bos)
    if tokenizer.vocab_size > config.vocab_size:
        problem = f"{tokenizer.vocab_size} tokens, but the embedding has only {config.vocab_size} rows"
        raise ModelFileError(path, problem)
    return Checkpoint(path, config, tokenizer, _gguf_chat_template(file), weights)


def _gguf_chat_template(file: GGUFFile) -> ChatTemplate | None:
    source = file.get("tokenizer.chat_template", str, "")
    if not source:
        return None
    tokens = file.require("tokenizer.ggml.tokens", list)
    special = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= token < len(tokens):
            special[name] = tokens[token]
    try:
        return ChatTemplate(source, special)
    except ValueError as error:
        raise ModelFileError(file.path, str(error)) from None
