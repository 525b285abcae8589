"""From tokens to text as they come: whole characters only, nothing of a stop string, and each token's own bytes."""

from typing import Any

__all__ = ["StopFinder", "TextStream", "TokenNames"]

REPLACEMENT = "\ufffd"


class TextStream:
    """Text of a growing list of tokens. The pieces, joined, are the text; none ends inside a character."""

    def __init__(self, tokenizer: Any) -> None:  # transformers gives its tokenizers no common type for decode
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text is decoded from `_context` on, because some tokenizers render a token by its neighbours (a space at
        # the start of a word); what lies before `_read` has been given out.
        self._context = 0
        self._read = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        known, text = self._decode(self._context, self._read), self._decode(self._context, None)
        if text.endswith(REPLACEMENT) or len(text) <= len(known):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def flush(self) -> str:
        """What was held back, at the end: an unfinished character becomes U+FFFD."""
        known, text = self._decode(self._context, self._read), self._decode(self._context, None)
        self._context = self._read = len(self._tokens)
        return text[len(known) :]

    def _decode(self, start: int, end: int | None) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopFinder:
    """Lets text through up to the first stop string, and holds back what may yet become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text to give out, and whether a stop string was met."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = max(held_back(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class TokenNames:
    """A token's text and bytes, as the OpenAI form of log-probabilities shows them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._byte_level = _byte_level(tokenizer)

    def __call__(self, token: int) -> tuple[str, list[int]]:
        named = self._known.get(token)
        if named is None:
            named = self._known[token] = self._name(token)
        return named

    def _name(self, token: int) -> tuple[str, list[int]]:
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if self._byte_level and REPLACEMENT in text:
            spelled = self._tokenizer.convert_ids_to_tokens(token)
            return text, [_BYTES[character] for character in spelled if character in _BYTES]
        return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE writes bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)
