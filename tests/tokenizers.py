"""Tiny tokenizers of both families, trained on a sentence, and folders of them."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "the cat sat on the mat, and the rat sat on the cat.",
    "naïve café, 東京 🙂 and   three spaces\n",
]
END = "<|end|>"
BEGIN = "<|begin|>"
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('no role ' + message.role) }}
    {% endif %}
{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}
"""


def byte_level():
    """As GPT-2 and Llama 3: every byte a character, special tokens around."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    _train(
        made,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BEGIN, END],
        vocab_size=300,
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
    )
    made.add_tokens(["<tool>"])
    return made


def byte_fallback():
    """As Llama 2: spaces are visible, what the vocabulary lacks is bytes."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(trained, special_tokens=special, vocab_size=360)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = trained.normalizer
    made.add_special_tokens([BEGIN, END, "<unk>"])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    made.decoder = decoders.Sequence(parts)
    return made


def metaspace():
    """As `byte_fallback`, by the one decoder that does it all."""
    made = byte_fallback()
    made.normalizer, made.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return made


def folder(path, *, made=None, template=TEMPLATE):
    """A folder as Hugging Face's libraries write it."""
    path.mkdir(exist_ok=True)
    (made or byte_level()).save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": BEGIN, "special": True}, "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return str(path)


def _train(made, **settings):
    made.train_from_iterator(SENTENCES * 3, trainers.BpeTrainer(show_progress=False, **settings))
