"""Text to token ids and back: one class over Hugging Face's `tokenizers`, whatever file it came from."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_REPLACEMENT = "\ufffd"
_WORD_START = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# How text is cut before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`. Each pattern
# cuts the pieces that the one before it left.
_PRE_TOKENIZERS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of `tokenizer.ggml.token_type`


class TokenStream:
    """Text of token ids that arrive one by one, in whole characters.

    The pieces that `push` returns, and the rest that `flush` returns, concatenate to the text of all ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        # Some decoders drop a space at the start of a text: the ids of the piece before stay as context.
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is still short of bytes."""
        self._ids = [*self._ids, int(token_id)]  # a copy of the stream keeps its own
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """What was held back; call it once, after the last id."""
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece:
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._context_text = self._decode(self._ids)
        return piece


class Tokenizer:
    """A model's tokenizer, the ids that end its answers, and its chat template if it has one.

    Args:
        backend: the `tokenizers.Tokenizer` that does the work.
        special_tokens: texts by name, as chat templates want them: `{"bos_token": "<s>", ...}`.
        eos_token_ids: ids after which generation stops.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template

    @property
    def bos_token_id(self) -> int | None:
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self.backend.token_to_id(bos)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        Args:
            add_special_tokens: add what the model's files ask for around a text, mostly a token for its
                beginning. False for text from `apply_chat_template`, which holds it already.

        Raises:
            ValueError: `text` is no valid Unicode (it holds lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"expected a text of valid Unicode characters, got {text!r}: {error}") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that form no character become U+FFFD."""
        return self.backend.decode([int(i) for i in token_ids], skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """A decoder for ids that arrive one by one."""
        return TokenStream(functools.partial(self.decode, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text that the model was trained to read for these messages.

        Args:
            messages: `{"role": "system" | "user" | "assistant", "content": text}`, oldest first.
            add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
            ValueError: the model has no chat template, or the template does not take these messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give it a plain prompt")
        try:
            template = _template_environment().from_string(self.chat_template)
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # the template is a program from a file: it may raise anything
            raise ValueError(f"the model's chat template failed on {messages!r}: {error}") from error


def _template_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for; sandboxed, since they come from files nobody here controls."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these special tokens before and after every text it encodes, and no others."""
    present = [token for token in (bos, eos) if token is not None]
    for token in present:
        if backend.token_to_id(token) is None:
            raise ValueError(f"special token {token!r} is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[token for token in (bos, "$A", eos) if token is not None],
        special_tokens=[(token, backend.token_to_id(token)) for token in present],
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        ValueError: a kind of tokenizer other than byte-level BPE ("gpt2") and SentencePiece BPE ("llama"),
            or a `tokenizer.ggml.pre` that is not known.
    """
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    needed = {"gpt2": ("tokens", "token_type", "merges"), "llama": ("tokens", "token_type", "scores")}
    if ggml["model"] not in needed:
        raise ValueError(f"expected tokenizer.ggml.model to be one of {list(needed)}, got {ggml['model']!r}")
    for key in needed[ggml["model"]]:
        if key not in ggml:
            raise ValueError(f"tokenizer.ggml.{key} is missing")
    tokens, kinds = ggml["tokens"], ggml["token_type"]
    if ggml["model"] == "gpt2":
        backend = _byte_level_bpe(tokens, ggml["merges"], ggml.get("pre", "default"))
        add_bos = ggml.get("pre") == "llama-bpe"
    else:
        unknown = tokens[ggml.get("unknown_token_id", 0)]
        scores = {t: s for t, s, k in zip(tokens, ggml["scores"], kinds, strict=True) if k == _NORMAL}
        backend = _sentencepiece_bpe(tokens, scores, unknown, ggml.get("add_space_prefix", True))
        add_bos = True
    backend.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    special_tokens = {name: tokens[ggml[key]] for name, key in names.items() if key in ggml}
    bos = special_tokens.get("bos_token") if ggml.get("add_bos_token", add_bos) else None
    eos = special_tokens.get("eos_token") if ggml.get("add_eos_token", False) else None
    surround(backend, bos, eos)
    ends = [ggml[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ggml]
    return Tokenizer(backend, special_tokens, ends, metadata.get("tokenizer.chat_template"))


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"expected tokenizer.ggml.pre to be one of {list(_PRE_TOKENIZERS)}, got {pre!r}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    tokens: list[str], scores: dict[str, float], unknown: str, add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece merges whichever neighbours form the piece of highest score; here as a list of merges."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-score, len(piece) - cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    pairs = [(left, right) for _, _, left, right in sorted(merges)]
    model = models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend(_WORD_START)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _WORD_START)])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    spaces = decoders.Replace(_WORD_START, " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
