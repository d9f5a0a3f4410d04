"""Tokenizer, streaming, stop strings, chat templates: against transformers, and against their own definitions."""

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import pre_tokenizers

from pykernels.models import PACKAGED_MODELS, ChatTemplate, Checkpoint, StopStrings, StreamDecoder, load_checkpoint
from pykernels.models.pretokenize import PRE_TOKENIZERS

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, then\ttab,\n\nnewlines \r\n and trailing   ",
    "don't you'll we've I'M it's DON'T",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x ** 2, \"b\": 0x1F}  # comment\n\n\nclass A:\n\tpass",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 3.14159f; }",
    "1234567890 and 12,345.67 or ١٢٣ ½ Ⅷ 2²",
    "x  5 y   66\n  7",  # several spaces before a digit: the digits are cut off first
    "Ελληνικά, русский, العربية, עברית, हिन्दी, ไทย",
    "日本語の文章と中文句子，한국어 문장。",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 emoji 👍🏽 and ☕️",
    "e\u0301 ne\u0308 zero\u200bwidth \u00a0nbsp \u3000wide \ufeffbom",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> <|not_a_token|>",
    "https://example.com/path?query=1&other=%20#frag",
    "\x00\x01\x7f control characters",
    "supercalifragilisticexpialidocious " * 3,
    "a" * 300 + " " * 50 + "!" * 40,
    "| table | of |\n|---|---|\n| 1 | 2 |\n",
]
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? <b>&amp;</b>"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "日本語 😀\n"},
    ],
]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    try:
        return load_checkpoint("smollm2")
    except ValueError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(f"needs the weights: {PACKAGED_MODELS['smollm2'].install}")


@pytest.fixture(scope="module")
def theirs(smollm2: Checkpoint) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, the other implementation")
    return transformers.AutoTokenizer.from_pretrained(str(smollm2.path.parent), gguf_file=smollm2.path.name)


@pytest.fixture(scope="module")
def theirs_with_digits(smollm2: Checkpoint, theirs: Any) -> Any:
    """transformers has no rule for `pre = smollm` and leaves GPT-2's; this is that of SmolLM2's own tokenizer.json."""
    backend = type(theirs.backend_tokenizer).from_str(theirs.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def mixed_text() -> st.SearchStrategy[str]:
    """Without what SmolLM2's vocabulary cannot spell: six control characters and unassigned planes."""
    words = st.sampled_from(
        [" ", "  ", "\n", "\t", "7", "42", "the", "'s", "é", "日本", "😀", "👍🏽", "<|im_end|>", "<|", "_", "\u0301"]
    )
    spelt = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\x04\x06\x13\x14\x16\x1d")
    return st.lists(st.one_of(words, st.text(spelt, max_size=6)), max_size=12).map("".join)


@pytest.mark.parametrize("text", CORPUS)
def test_ids_and_text_are_those_of_transformers(smollm2: Checkpoint, theirs_with_digits: Any, text: str) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert ids == theirs_with_digits.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        assert smollm2.tokenizer.decode(ids, skip_special=skip) == theirs_with_digits.decode(
            ids, skip_special_tokens=skip
        )


def test_only_texts_with_digits_differ_from_transformers_own_conversion(smollm2: Checkpoint, theirs: Any) -> None:
    different = [t for t in CORPUS if smollm2.tokenizer.encode(t) != theirs(t, add_special_tokens=False)["input_ids"]]
    assert "x  5 y   66\n  7" in different
    assert all(any(c.isnumeric() for c in t) for t in different)


def test_characters_that_the_vocabulary_cannot_spell_are_left_out(smollm2: Checkpoint, theirs: Any) -> None:
    text = "a\x04b\U00040000c"
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == theirs.decode(theirs(text)["input_ids"])
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode("a\x04b")) == "ab"


@settings(max_examples=200, deadline=None)
@given(text=mixed_text())
def test_any_text_has_transformers_ids_and_comes_back(smollm2: Checkpoint, theirs_with_digits: Any, text: str) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(text)
    assert ids == theirs_with_digits.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special=False) == text


@settings(max_examples=100, deadline=None)
@given(text=mixed_text())
def test_special_tokens_in_untrusted_text_can_be_taken_as_characters(smollm2: Checkpoint, text: str) -> None:
    ids = smollm2.tokenizer.encode(text, parse_special=False)
    assert not smollm2.tokenizer.special_ids.intersection(ids)
    assert smollm2.tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_decoded_text_and_has_whole_characters(
    smollm2: Checkpoint, data: st.DataObject, skip: bool
) -> None:
    """Random ids include bytes that are no UTF-8 at all; cutting anywhere gives a beginning of the whole text."""
    tokenizer = smollm2.tokenizer
    some_bytes = st.integers(17, 400)  # single bytes and short tokens: where characters are cut
    ids = data.draw(st.lists(st.one_of(some_bytes, st.integers(0, tokenizer.vocab_size - 1)), max_size=40))
    whole = tokenizer.decode(ids, skip_special=skip)
    decoder = StreamDecoder(tokenizer, skip_special=skip)
    pieces = [decoder.feed(i) for i in ids]
    for cut in range(len(pieces) + 1):
        assert whole.startswith("".join(pieces[:cut]))
    assert "".join(pieces) + decoder.flush() == whole


@settings(max_examples=100, deadline=None)
@given(text=mixed_text())
def test_valid_text_streams_without_a_replacement_character(smollm2: Checkpoint, text: str) -> None:
    decoder, tokenizer = StreamDecoder(smollm2.tokenizer, skip_special=False), smollm2.tokenizer
    pieces = [decoder.feed(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text  # nothing is left for flush
    assert decoder.flush() == ""


def test_an_emoji_appears_with_its_last_byte_and_half_of_one_is_flushed(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode("🦩")
    assert len(ids) > 1
    decoder = StreamDecoder(tokenizer)
    assert [decoder.feed(i) for i in ids] == [""] * (len(ids) - 1) + ["🦩"]
    half = StreamDecoder(tokenizer)
    assert [half.feed(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert half.flush() == "\ufffd"


def test_an_id_outside_the_vocabulary_is_refused(smollm2: Checkpoint) -> None:
    for token in (-1, 49152):
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 49152"):
            smollm2.tokenizer.decode([token])


def test_bos_is_added_only_where_the_model_wants_it() -> None:
    from pykernels.models.tokenizer import Tokenizer

    with_bos = Tokenizer(tiny_tokenizer(), [0, 1, 2], bos_id=0, add_bos=True)
    without = Tokenizer(tiny_tokenizer(), [0, 1, 2], bos_id=0, add_bos=False)
    plain = without.encode("the")
    assert with_bos.encode("the") == [0, *plain]
    assert with_bos.encode("the", add_special=False) == plain
    assert with_bos.encode("") == [0]


PIECES = {
    "gpt-2": ["x", " ", " 12345", "'s"],
    "smollm": ["x", "  ", "1", "2", "3", "4", "5", "'s"],
    "llama-bpe": ["x", " ", " ", "123", "45", "'s"],
    "qwen2": ["x", " ", " ", "1", "2", "3", "4", "5", "'s"],
    "tekken": ["x", " ", " ", "1", "2", "3", "4", "5", "'s"],
}


@pytest.mark.parametrize("name", PIECES)
def test_each_pre_tokenizer_cuts_numbers_and_spaces_in_its_own_way(name: str) -> None:
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str("x  12345's")
    assert [piece.replace("Ġ", " ") for piece, _ in pieces] == PIECES[name]


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the definition."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_never_leak_and_do_not_depend_on_the_pieces(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
    text = data.draw(st.text("abc\n", max_size=30))
    expected, matched = naive_stop(text, stops)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, given_out = StopStrings(stops), ""
    for piece in pieces:
        given_out += matcher.feed(piece)
        assert expected.startswith(given_out)
    assert given_out + matcher.flush() == expected
    assert matcher.matched == matched


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert [matcher.feed(t) for t in ["Hi", "\n", "\n", "U", "nder", "\n\n", "User:", "more"]] == [
        "Hi",
        "",
        "",
        "",
        "\n\nUnder",
        "",
        "",
        "",
    ]
    assert matcher.matched == "\n\nUser:"
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", ["abc", [""], ["a", 3]])
def test_stop_must_be_a_list_of_non_empty_strings(stops: Any) -> None:
    with pytest.raises(ValueError, match="stop must be a list of non-empty strings"):
        StopStrings(stops)


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_rendered_as_by_transformers(smollm2: Checkpoint, theirs: Any, messages: Any, prompt: bool) -> None:
    assert smollm2.chat_template is not None
    ours = smollm2.chat_template.render_chat(messages, add_generation_prompt=prompt)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\nU {{ m.content }}\n  {% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{% if tools is not none %}tools{% endif %}{{ documents }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}",
    "{{ messages[0].content.split(' ')[0] }}{{ messages[-1]['role'].upper() }}{{ enable_thinking }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("messages", MESSAGES)
def test_template_features_are_those_of_transformers(theirs: Any, source: str, messages: Any) -> None:
    special = {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}
    ours = ChatTemplate(source, special).render_chat(messages, add_generation_prompt=False, enable_thinking=True)
    assert ours == theirs.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=False, tokenize=False, enable_thinking=True
    )


def test_strftime_now_is_the_present_year() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render_chat([{"role": "user", "content": ""}])
    assert abs(int(text) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], "not safely callable|immutable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "unsafe"),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], "refuses these messages"),
        ("{{ x }}", [], "messages is empty"),
        ("{{ x }}", [{"content": "x"}], r"messages\[0\] must be a mapping with a role"),
        ("{{ x }}", [{"role": "user"}], r"messages\[0\] has no content"),
    ],
)
def test_a_template_that_cannot_render_gives_one_line(source: str, messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ChatTemplate(source, {}).render_chat(messages)
    assert "\n" not in str(caught.value)
