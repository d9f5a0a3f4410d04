"""Models on disk: configuration, weights, tokenizer, chat template; and the decoder that runs them on the ops."""

from .chat import ChatTemplate
from .checkpoint import Checkpoint, load_checkpoint
from .config import ModelConfig, RopeScaling, inv_freq
from .errors import ModelFileError
from .gguf_file import GGUFFile
from .locate import PACKAGED_MODELS, resolve_model
from .streaming import StopStrings, StreamDecoder
from .tokenizer import Tokenizer
from .weights import LayerWeights, ModelWeights, WeightSource

__all__ = [
    "PACKAGED_MODELS",
    "ChatTemplate",
    "Checkpoint",
    "GGUFFile",
    "LayerWeights",
    "ModelConfig",
    "ModelFileError",
    "ModelWeights",
    "RopeScaling",
    "StopStrings",
    "StreamDecoder",
    "Tokenizer",
    "WeightSource",
    "inv_freq",
    "load_checkpoint",
    "resolve_model",
]
