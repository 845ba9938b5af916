"""Text to ids and back: SmolLM2's pre-tokeniser, bytes of tokens, chat templates, other kinds of tokenizer.json."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cbserve.errors import ModelError
from cbserve.models.tokenizer import BYTE_CHARS, ByteTokenizer, Tokenizer

TEXTS = [
    "Hello, world!",
    "",
    " leading space",
    "   three leading, and  two   three    four between",
    "12345 and 3.14159, 1,000,000; v2 2x x2y",
    "E = mc² and 10²³ and x₁₂ and ½ and Ⅷ and ٣٤",
    "smile 😀 family 👨‍👩‍👧 flag 🇫🇷 accents é è ñ 日本語 עברית",
    "line\nline\n\nline\n\n\n\nline\r\n\ttab\t\ttabs",
    "trailing   ",
    "def f(x):\n    return x**2  # don't, we'll, I'M",
    "\u00a0no-break \u3000wide \u200bzero",
]


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trips(smollm2, text):
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.backend.decode(ids) == text  # the library agrees with the concatenated bytes


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234", ["1", "2", "3", "4"]),
        (" 42", [" ", "4", "2"]),
        ("in 2024.", ["in", " ", "2", "0", "2", "4", "."]),
        ("x²³", ["x", "²", "³"]),
        ("10³", ["1", "0", "³"]),
        ("  hi", [" ", " hi"]),
        ("hi  there", ["hi", " ", " there"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),  # the last of a run goes alone, as a space goes with its word
        ("a\n\n\n", ["a", "\n\n\n"]),
        ("don't", ["don", "'t"]),
    ],
)
def test_smollm2_splits_digits_first_then_as_gpt2(smollm2, text, pieces):
    tokenizer = smollm2.tokenizer
    assert [tokenizer.decode([id]) for id in tokenizer.encode(text)] == pieces


@pytest.mark.model
def test_smollm2_special_tokens(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == smollm2.config.vocab_size == 49152
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>")[0::4] == [1, 2]
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"


@pytest.mark.model
def test_smollm2_token_bytes_of_a_split_character(smollm2):
    ids = smollm2.tokenizer.encode("🦥")
    assert len(ids) > 1
    assert b"".join(map(smollm2.tokenizer.token_bytes, ids)) == "🦥".encode()
    assert smollm2.tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.model
def test_smollm2_chat_with_its_own_system_prompt(smollm2):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2+2?"},
    ]
    assert smollm2.tokenizer.render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not smollm2.tokenizer.render_chat(messages, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_is_utf8(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokenizer_has_every_byte_once_and_silent_specials():
    tokenizer = ByteTokenizer(320)
    assert tokenizer.vocab_size == 320
    assert [tokenizer.token_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert {tokenizer.token_bytes(id) for id in [*range(256, 320), 320, 10**6, -1]} == {b""}
    assert tokenizer.special_token_ids == frozenset(range(256, 320))
    assert tokenizer.encode("<|eos|>") == list(tokenizer.eos_token_ids)


def test_byte_tokenizer_chat():
    ids = ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [259, *b"hi", 257, 260]


def test_a_byte_tokenizer_needs_room():
    with pytest.raises(ModelError, match="vocab_size is 256"):
        ByteTokenizer(256)


@pytest.mark.parametrize("prompt", [7, None, b"bytes", ["a"]])
def test_only_text_is_encoded(prompt):
    with pytest.raises(ModelError, match="must be a string"):
        ByteTokenizer().encode(prompt)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(ModelError, match="not valid Unicode"):
        ByteTokenizer().encode("bad \ud800 text")


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_wrong_messages_are_refused(messages):
    with pytest.raises(ModelError, match="a conversation is a non-empty list"):
        ByteTokenizer().apply_chat_template(messages)


@pytest.mark.parametrize(("part", "value"), [("content", None), ("content", 5), ("content", ["hi"]), ("role", None)])
def test_a_message_that_is_no_text_is_refused_by_its_part(part, value):
    with pytest.raises(ModelError, match=re.escape(f"a message's {part} is {value!r}: it must be text")):
        ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"} | {part: value}])


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(ByteTokenizer().backend, bos_token_id=256, eos_token_ids=(257,), chat_template=template)


def test_template_blocks_are_trimmed_and_stripped():
    template = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ bos_token }}{{ m.content }}\n    {% endif %}\n"
        "{% endfor %}\nend"
    )
    assert with_template(template).render_chat([{"role": "user", "content": "hi"}]) == "<|bos|>hi\nend"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "refuses"),
    ],
)
def test_a_template_that_fails_says_why(template, words):
    with pytest.raises(ModelError, match=words):
        with_template(template).render_chat([{"role": "user", "content": "hi"}])


def sentencepiece_like() -> Backend:
    """The kind of Llama 2 and TinyLlama: spaces as U+2581, unknown characters as bytes, a BOS before every prompt."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]:
        vocab[token] = len(vocab)
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def test_a_sentencepiece_tokenizer_gives_bytes_too():
    tokenizer = Tokenizer(sentencepiece_like(), bos_token_id=1, eos_token_ids=(2,))
    ids = tokenizer.encode("hi é<tool>")
    assert tokenizer.decode(ids) == " hi é<tool>"
    assert [tokenizer.token_bytes(id) for id in ids] == [b" hi", b" ", b"\xc3", b"\xa9", b"<tool>"]
    assert tokenizer.token_bytes(2) == b""


@pytest.mark.parametrize("kind", ["own file", "string", "list", "absent"])
def test_a_chat_template_is_found_where_it_is_kept(tmp_path, kind):
    with_template(None).save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    if kind == "own file":
        (tmp_path / "chat_template.jinja").write_text("T")
    elif kind == "string":
        config.write_text(json.dumps({"chat_template": "T"}))
    elif kind == "list":
        named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "T"}]
        config.write_text(json.dumps({"chat_template": named}))
    loaded = Tokenizer.load(tmp_path, bos_token_id=256, eos_token_ids=(257,))
    assert loaded.chat_template == (None if kind == "absent" else "T")


def test_a_saved_tokenizer_reads_back_the_same(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path, bos_token_id=256, eos_token_ids=(257,))
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert loaded.special_token_ids == tokenizer.special_token_ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == [259, *b"hi", 257, 260]


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing; copy"):
        Tokenizer.load(tmp_path, bos_token_id=None, eos_token_ids=())
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path, bos_token_id=None, eos_token_ids=())


def test_the_byte_alphabet_is_that_of_gpt2():
    assert len(set(BYTE_CHARS)) == 256
    assert (BYTE_CHARS[ord(" ")], BYTE_CHARS[ord("\n")], BYTE_CHARS[ord("A")], BYTE_CHARS[0xAD]) == ("Ġ", "Ċ", "A", "Ń")
