"""Text that appears token by token: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer


class StreamDecoder:
    """Turns token ids into text as they arrive.

    The pieces, `flush()` included, joined, are `tokenizer.decode(ids)`. A character whose bytes are spread over several
    tokens is given out when its last byte is there.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes, often "" in the middle of an emoji."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=self._skip_special))

    def flush(self) -> str:
        """What the text ends with if it ends here: U+FFFD for a character that was never completed, else ""."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the first stop string, and never gives out any part of it.

    The first is the one that is complete first (of several complete at once, the longest), so the result does not
    depend on how the text is cut into pieces. Text that may be the beginning of a stop string is held back until that
    is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop must be a list of non-empty strings, got {stops!r}")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be given out after `text` has arrived; `matched` says whether the end was reached."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """The length of the longest end of `text` that is a beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
