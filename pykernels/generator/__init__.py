"""A minimal generator on our ops: requests, sampling, and an engine with prefill and decode as two visible phases."""

from .generator import Generator
from .request import Completion, SamplingParams, TokenLogprob

__all__ = ["Completion", "Generator", "SamplingParams", "TokenLogprob"]
