"""Tokenizers: the exact bytes of each token, chat templates, and files that are wrong."""

import base64
import json
import pathlib
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Theirs, decoders

from ladder_jax.data import tokenizer
from tests import tokenizers
from tests.refusals import refused

FAMILIES = ["byte_level", "byte_fallback", "metaspace"]
TEXTS = [
    "the cat sat on the mat",
    "  two spaces before, three   inside, one after ",
    "naïve café\n\n\ttab",
    "東京 — 🙂👩‍👩‍👧 e\u0301",
    "\u0000\u007f\u0080\u07ff\uffff\U0010ffff",
    "Ġ and ▁ and <0x41> are text, too",
    "<tool>the<tool>",
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    made = getattr(tokenizers, request.param)()
    return (
        tokenizer.load(tokenizers.folder(tmp_path_factory.mktemp("t") / "t", made=made)),
        made,
        request.param,
    )


def texts():
    rng = random.Random(0)
    alphabet = "abcdefgh  \n\tthecat éüß東京漢字🙂\u0301\u200d"
    yield from TEXTS
    for _ in range(200):
        yield "".join(rng.choices(alphabet, k=rng.randint(1, 40)))


def test_tokens_are_exact_bytes(family):
    """Text -> tokens -> the bytes of each -> text; and as `tokenizers` itself decodes them."""
    ours, theirs, name = family
    for text in texts():
        tokens = ours.encode(text)
        joined = b"".join(ours.to_bytes([token]) for token in tokens)
        assert joined == ours.to_bytes(np.array(tokens, np.int64))
        assert joined.endswith(ours.decode(tokens).encode())
        # it takes the first space for its own, and theirs drops all
        if name == "metaspace" and text.startswith(" "):
            assert joined == text.replace("▁", " ").encode()
            continue
        # Sentencepiece cannot tell its visible space from a space.
        assert ours.decode(tokens) == (text if name == "byte_level" else text.replace("▁", " "))
        assert ours.decode(tokens) == theirs.decode(tokens)


def test_what_is_around_a_text(family):
    ours, theirs, name = family
    tokens = ours.encode("the cat")
    assert tokens == theirs.encode("the cat").ids
    if name == "byte_level":
        assert tokens[0] == theirs.token_to_id(tokenizers.BEGIN)
        assert ours.to_bytes(tokens[:1]) == b""
    assert ours.stop_ids == (theirs.token_to_id(tokenizers.END),)
    assert ours.to_bytes(ours.stop_ids) == b""
    assert ours.vocab_size == theirs.get_vocab_size() == 1 + max(theirs.get_vocab().values())
    # a padded table's rows
    assert ours.to_bytes([10**6, tokens[-1], -1]) == ours.to_bytes([tokens[-1]])


def test_bytes():
    ours = tokenizer.load(None)
    assert ours == tokenizer.load("bytes")
    assert (ours.name, ours.vocab_size, ours.stop_ids) == ("bytes", 256, ())
    assert ours.encode("é") == [0xC3, 0xA9]
    assert ours.encode("\udc80") == [0x80]
    assert ours.decode(np.array([72, 105, 0xFF, 300])) == "Hi\ufffd"
    with refused("'bytes' has no chat template"):
        ours.chat([])


def test_a_text_has_one_encoding(tmp_path):
    """Whatever a tokenizer.json keeps from its training: dropout, which draws the merges anew at
    each call, truncation and padding.
    """
    plain = tokenizer.load(tokenizers.folder(tmp_path / "plain")).encode(TEXTS[0])
    made = tokenizers.byte_level()
    made.model.dropout = 1.0  # no merge at all
    made.enable_truncation(5)
    made.enable_padding(length=99)
    ours = tokenizer.load(tokenizers.folder(tmp_path / "t", made=made))
    assert ours.encode(TEXTS[0]) == ours.offsets(TEXTS[0], special=True)[0] == plain


def test_several_stop_ids(tmp_path):
    folder = pathlib.Path(tokenizers.folder(tmp_path / "t"))

    def stops(file, **fields):
        (folder / file).write_text(json.dumps(fields))
        return tokenizer.load(folder).stop_ids

    (end,) = tokenizer.load(folder).stop_ids
    assert stops("generation_config.json", eos_token_id=[7, end, 9]) == (end, 7, 9)
    assert stops("generation_config.json", eos_token_id=8) == (end, 8)
    # as transformers reads them, which writes added_tokens_decoder since 4.34
    assert stops("special_tokens_map.json", eos_token=tokenizers.BEGIN) == (0, 8)
    assert stops("tokenizer_config.json", eos_token=tokenizers.END, added_tokens_decoder={}) == (
        end,
        8,
    )
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").unlink()
    assert tokenizer.load(folder).stop_ids == (8,)
    assert stops("special_tokens_map.json", eos_token={"content": tokenizers.END}) == (end, 8)
    # what is no token would be written into token stores, in fewer bits, and into training rows
    for none in (-1, 2**40, True, [-1, tokenizer.load(folder).vocab_size]):
        assert stops("generation_config.json", eos_token_id=none) == (end,)


def test_the_chat_template(tmp_path):
    ours = tokenizer.load(tokenizers.folder(tmp_path / "t"))
    theirs = Theirs.from_file(str(tmp_path / "t/tokenizer.json"))
    tokens = ours.chat(
        [{"role": "system", "content": " be kind "}, {"role": "user", "content": "the <cat>"}]
    )
    text = "<|begin|>system: be kind<|end|>\nuser: the <cat><|end|>\nassistant:"
    assert tokens == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(tokens) == "system: be kind\nuser: the <cat>\nassistant:"
    with refused("the chat template refuses these messages: no role wizard"):
        ours.chat([{"role": "wizard", "content": "x"}])
    with refused("a message must be such as"):
        ours.chat(["x"])


def rendered(tmp_path, template):
    ours = tokenizer.load(tokenizers.folder(tmp_path / "t", template=template))
    return ours.decode(ours.chat([{"role": "user", "content": "é<"}]))


@pytest.mark.parametrize(
    "template, text",
    {
        "{{ messages | tojson }}": '[{"role": "user", "content": "é<"}]',
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}": "é<!",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "{{ strftime_now('%Y')[:2] }}{{ tools is none }}": "20True",
        "a\n   {% if true %}\nb\n   {% endif %}\n": "a\nb\n",
        # nothing of the program's
        "{{ ('<{0.__globals__}>' | attr('format'))(raise_exception) }}": "<>",
        "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}": "2",
    }.items(),
)
def test_what_templates_may_use(tmp_path, template, text):
    assert rendered(tmp_path, template) == text


@pytest.mark.parametrize(
    "template, message",
    {
        "{% if %}": "chat template is not valid",
        "{{ messages.append(1) }}": "refuses these messages: .*unsafe",
        "{{ ''.__class__.__mro__ }}": "refuses these messages: .*unsafe",
        "{{ messages[0].content + 1 }}": "refuses these messages",
        "{% for i in range(10**9) %}x{% endfor %}": "refuses these messages: Range too big",
        None: "has no chat template",
    }.items(),
)
def test_templates_that_do_not_work(tmp_path, template, message):
    with refused(message):
        rendered(tmp_path, template)


def test_templates_in_the_configuration(tmp_path):
    folder = pathlib.Path(tokenizers.folder(tmp_path / "t", template=None))
    for value in (
        "one",
        [{"name": "tools", "template": "two"}, {"name": "default", "template": "one"}],
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        ours = tokenizer.load(folder)
        assert ours.has_chat
        assert ours.decode(ours.chat([])) == "one"


def test_a_copy_for_a_run(tmp_path):
    ours = tokenizer.load(tokenizers.folder(tmp_path / "a"))
    where = tmp_path / "run/tokenizer"
    for _ in range(2):
        tokenizer.save(ours, where)
    copy = tokenizer.load(where)
    assert (copy.name, copy.chat([]), copy.stop_ids) == (ours.name, ours.chat([]), ours.stop_ids)
    other = tokenizer.load(tokenizers.folder(tmp_path / "b", made=tokenizers.byte_fallback()))
    assert other.name != ours.name
    for one in (other, tokenizer.load("bytes")):
        with refused("holds another tokenizer"):
            tokenizer.save(one, where)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["tokenizer"]
    tokenizer.save(tokenizer.load("bytes"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def word_piece():
    made = tokenizers.byte_level()
    made.decoder = decoders.WordPiece()
    return made


def changed(folder, **fields):
    """tokenizer.json with other fields."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def charsmap(content):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


EMPTY = dict(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[], post_processor=None)


@pytest.mark.parametrize(
    "message, damage",
    {
        "holds no tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
        "is not a tokenizer": lambda f: (f / "tokenizer.json").write_text("{}"),
        "is not UTF-8 text": lambda f: (f / "tokenizer.json").write_bytes(b"\xff"),
        "is not JSON": lambda f: (f / "tokenizer_config.json").write_text("{"),
        "must hold a JSON object": lambda f: (f / "generation_config.json").write_text("[]"),
        "decoder 'WordPiece' is not supported": lambda f: word_piece().save(
            str(f / "tokenizer.json")
        ),
        "cannot encode this text": lambda f: (f / "tokenizer_config.json").write_text(
            '{"eos_token": "\\ud800"}'
        ),
        "is not a tokenizer: .*empty": lambda f: changed(f, **EMPTY),
        "is not a tokenizer: .*Cannot parse precompiled_charsmap": lambda f: changed(
            f, normalizer=charsmap(b"")
        ),
        "is not a tokenizer: index out of bounds": lambda f: changed(
            f, normalizer=charsmap(b"\1\0\0\0")
        ),
    }.items(),
)
def test_files_that_are_wrong(tmp_path, damage, message):
    folder = pathlib.Path(tokenizers.folder(tmp_path / "t"))
    damage(folder)
    with refused(message):
        tokenizer.load(folder)


def test_mistakes(tmp_path):
    ours = tokenizer.load(tokenizers.folder(tmp_path / "t"))
    folder = pathlib.Path(tokenizers.folder(tmp_path / "panics"))
    # its table is too short for any letter
    changed(folder, added_tokens=[], normalizer=charsmap(b"\4" + bytes(7)))
    with refused("the tokenizer in .*panics' cannot encode this text: index out of bounds"):
        tokenizer.load(folder).encode("a")
    with refused("cannot encode this text: .*surrogates"):
        ours.encode("a\udc80")
