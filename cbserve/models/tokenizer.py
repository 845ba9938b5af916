"""Text to token ids and back, over the `tokenizers` library; the raw bytes of every token; chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cbserve.errors import ModelError


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each of the 256 bytes (GPT-2's `bytes_to_unicode`)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + i) for i in range(256))  # the others are moved behind Latin-1, in order
    return [chr(byte) if byte in visible else next(hidden) for byte in range(256)]


BYTE_CHARS = _byte_alphabet()
_CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}


class Tokenizer:
    """A tokenizer of a model: what `tokenizers` knows, plus ids with a meaning and the chat template.

    Text is always the concatenation of `token_bytes`, so what is streamed and what is returned cannot differ.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_padding()  # a tokenizer.json may carry both, meant for training
        backend.no_truncation()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id for id, token in added.items() if token.special)
        self._plain_added = {id: token.content.encode() for id, token in added.items() if not token.special}
        # Byte-level BPE (GPT-2, Llama 3) or SentencePiece with byte fallback (Llama 2).
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the tokenizer knows; a model may have more rows than that."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it ("<|im_end|>") become their ids.

        `add_special_tokens=False` leaves out what the model wants around every prompt (a BOS, with some models).
        Raises `ModelError` if `text` is not a valid string.
        """
        if not isinstance(text, str):
            raise ModelError(f"a prompt must be a string to be encoded, not {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:  # which of them depends on the release of tokenizers
            raise ModelError(
                f"the prompt is not valid Unicode ({error}); decode it with errors='replace' where it is read"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens give nothing, bytes that are not UTF-8 give U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Raw bytes of one token, perhaps a part of a character; b"" for special tokens and unknown ids."""
        if id in self.special_token_ids:
            return b""
        if (plain := self._plain_added.get(id)) is not None:
            return plain
        token = self.backend.id_to_token(id) if id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_CHAR_BYTES[char] for char in token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation of `{"role": ..., "content": ...}`, ready for the assistant's answer.

        Raises `ModelError` if the model has no chat template, or if it refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` encodes."""
        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template; use generate() with a plain prompt, or a model tuned for chat"
            )
        wrong = next((m for m in messages if not isinstance(m, Mapping) or not {"role", "content"} <= set(m)), None)
        if not messages or wrong is not None:
            raise ModelError(
                "a conversation is a non-empty list of {'role': ..., 'content': ...}, "
                f"got {wrong if messages else messages!r}"
            )
        for message in messages:
            for part in ("role", "content"):
                if not isinstance(message[part], str):
                    raise ModelError(
                        f"a message's {part} is {message[part]!r}: it must be text; the message is {message!r}"
                    )
        try:
            return _compiled(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._token_text(self.bos_token_id),
                eos_token=self._token_text(next(iter(self.eos_token_ids), None)),
            )
        except TemplateError as error:
            raise ModelError(f"the model's chat template refuses these messages: {error}") from error

    def _token_text(self, id: int | None) -> str:
        return "" if id is None else self.backend.id_to_token(id) or ""

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
        eos = self._token_text(next(iter(self.eos_token_ids), None))
        settings = {
            # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it without the digit split.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._token_text(self.bos_token_id) or None,
            "eos_token": eos or None,
            "pad_token": eos or None,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, bos_token_id: int | None, eos_token_ids: Sequence[int]) -> Tokenizer:
        """Read a Hugging Face folder: `tokenizer.json`, and the chat template from wherever it is kept.

        Raises `ModelError` naming the file that is missing or broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{path} is missing; copy tokenizer.json from the model's repository "
                "(a tokenizer.model alone is not enough: let transformers convert it with save_pretrained)"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises a bare Exception
            raise ModelError(f"{path} cannot be read ({error}); copy it from the model's repository again") from error
        return cls(
            backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids, chat_template=_read_template(folder)
        )


class ByteTokenizer(Tokenizer):
    """One token a byte: ids 0 to 255 are the bytes, then bos, eos and the marks of a chat; the rest is reserved.

    It needs no file and encodes any text, which is what the model `tiny` wants.
    """

    SPECIAL = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
    CHAT_TEMPLATE = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eos|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )

    def __init__(self, vocab_size: int = 320) -> None:
        first_reserved = 256 + len(self.SPECIAL)
        if vocab_size < first_reserved:
            raise ModelError(f"vocab_size is {vocab_size}, but bytes and marks alone are {first_reserved}")
        backend = Backend(models.BPE(vocab={char: byte for byte, char in enumerate(BYTE_CHARS)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        reserved = [f"<|reserved_{id}|>" for id in range(first_reserved, vocab_size)]
        backend.add_special_tokens([AddedToken(token, special=True) for token in [*self.SPECIAL, *reserved]])
        super().__init__(backend, bos_token_id=256, eos_token_ids=(257,), chat_template=self.CHAT_TEMPLATE)


@lru_cache
def _compiled(chat_template: str) -> Template:
    # As transformers renders it: block tags leave no blank lines behind. Sandboxed, because a template is a program
    # that came with a download.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(chat_template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _read_template(folder: Path) -> str | None:
    """transformers keeps it in a file of its own (since 4.51), or in tokenizer_config.json: one, or several by name."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); copy it from the model's repository again") from error
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
