"""The toy model: a tokenizer with a vocabulary of letter groups, and KV whose content decides the next token.

A token's KV is a function of everything that attention would have read for it: the KV content of all earlier
positions, and the token. The next token is a function of the KV content of all positions. So text depends on
what is *in* the blocks that were read: a missing, stale or foreign block changes every later word, and two
engines agree exactly when they read the same KV. Nothing here is random.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MASK = (1 << 64) - 1
EOS = 256
IM_START = 257
IM_END = 258
_SPECIAL_TEXT = {EOS: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_FIRST_PIECE = 259
# Letter groups of one, two and three letters in order, each without and with a space before it.
_GROUPS = 26 + 26**2 + 26**3
VOCAB_SIZE = _FIRST_PIECE + 2 * _GROUPS
_PIECES = re.compile(r" ?[a-z]{1,3}|[\s\S]")
_CONSONANTS = "bdfghklmnprstvwz"
_VOWELS = "aeiou"


def _piece_id(piece: str) -> int:
    """Id of a letter group: bijective base 26, doubled for the leading space."""
    space = piece[0] == " "
    number = 0
    for letter in piece[1:] if space else piece:
        number = number * 26 + ord(letter) - 96
    return _FIRST_PIECE + 2 * (number - 1) + space


class _PieceIds(dict[str, tuple[int, ...]]):
    """Ids of text pieces, found once each. Bounded: only letter groups and single ASCII characters are kept."""

    def __missing__(self, piece: str) -> tuple[int, ...]:
        letters = piece[1:] if piece[0] == " " else piece
        ids: tuple[int, ...]
        if letters and all("a" <= c <= "z" for c in letters):
            ids = (_piece_id(piece),)
        else:
            # A lone surrogate (JSON can carry one) is replaced, as byte-level tokenizers do.
            ids = tuple(piece.encode("utf-8", "replace"))
            if len(ids) > 1:
                return ids
        self[piece] = ids
        return ids


def _decode_token(token: int) -> bytes:
    if token < 256:
        return bytes((token,))
    if token < _FIRST_PIECE:
        return b""
    number, space = divmod(token - _FIRST_PIECE, 2)
    number += 1
    letters = ""
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(97 + digit) + letters
    return (" " + letters if space else letters).encode()


class Tokenizer:
    """Text to token ids and back. Loss-free for any Unicode text."""

    def __init__(self) -> None:
        self._ids = _PieceIds()
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids = self._ids
        out: list[int] = []
        for piece in _PIECES.findall(text):
            out.extend(ids[piece])
        return out

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids. Special tokens have none; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self._token_bytes, tokens)).decode("utf-8", "replace")

    def token_text(self, token: int, *, special: bool = False) -> str:
        """Text of one token; of a special token only if asked for."""
        if special and token in _SPECIAL_TEXT:
            return _SPECIAL_TEXT[token]
        return self._token_bytes(token).decode("utf-8", "replace")

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = _decode_token(token)
        return known


WORDS: tuple[int, ...] = tuple(
    _piece_id(f" {first}{vowel}{last}") for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS
)
"""The tokens that the model can say: a space and three letters, so that its own text encodes to the same ids."""


@dataclass(frozen=True, slots=True)
class ToyModel:
    """What stands for the weights.

    Attributes:
        weight: Odd factor of tokens, from the model's name: two models do not understand each other's KV.
        mean_output_tokens: One token in this many is the end-of-sequence token; 0 means none ever is.
    """

    weight: int
    mean_output_tokens: int = 64

    @classmethod
    def named(cls, name: str, mean_output_tokens: int = 64) -> ToyModel:
        """The model of this name; the same name gives the same weights in every process."""
        seed = zlib.crc32(name.encode()) | zlib.adler32(name.encode()) << 32
        return cls(weight=(seed * 0x9E3779B97F4A7C15 & MASK) | 1, mean_output_tokens=mean_output_tokens)

    def extend(self, context: int, tokens: Sequence[int]) -> list[int]:
        """KV of further tokens.

        Args:
            context: Sum of the KV content of all earlier positions (modulo 2**64), 0 if there are none.
            tokens: The tokens to compute.

        Returns:
            For each token the sum of KV content up to and including it. A position's own content is the
            difference to the sum before it.
        """
        weight = self.weight
        sums: list[int] = []
        append = sums.append
        for token in tokens:
            context = (context * 0xD1342543DE82EF95 + (token + 1) * weight) & MASK
            append(context)
        return sums

    def next_token(self, context: int, salt: int = 0, *, may_end: bool = True) -> int:
        """The token that follows.

        Args:
            context: Sum of the KV content of all positions.
            salt: Anything else that sampling depends on (seed, index of the choice); 0 is greedy.
            may_end: False forbids the end-of-sequence token.
        """
        mixed = mix(context ^ salt)
        if may_end and self.mean_output_tokens and (mixed >> 40) % self.mean_output_tokens == 0:
            return EOS
        return WORDS[mixed % 1280]


def mix(value: int) -> int:
    """Spread 64 bits so that any changed bit changes about half of the result (splitmix64's finaliser)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def logprob_of(context: int, rank: int) -> float:
    """A plausible log probability for the token of this rank (1 is the most likely), from the KV alone."""
    return -((mix(context) % 997) / 499.0) - (rank - 1) * 0.75
