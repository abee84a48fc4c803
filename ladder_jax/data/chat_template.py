"""Chat templates as Hugging Face's tokenizers bring them: Jinja, run in a sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence

from ladder_jax.errors import UserError, refused

TOOLS = ("tool", "ipython")  # roles of their answers


class ChatTemplate:
    """`ChatTemplate(source, tokens)(messages)`: the text of a prompt for the next answer, or of no
    more than was said.

    special: what the template may call by name, such as `bos_token`.
    """

    def __init__(self, source: str, *, special: Mapping[str, str]):
        self._special = dict(special)
        with refused("the tokenizer's chat template is not valid"):
            self._template = _environment().from_string(source)

    def __call__(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        prompt: bool,
        now: datetime.datetime | None,
    ) -> str:
        """now: what a template that asks for the time is told; None: this moment, by this machine's
        clock.
        """
        for message in messages:
            if not _is_message(message):
                raise UserError(
                    f'a message must be such as {{"role": "user", "content": "Hello"}}, not {message!r:.200}'
                )

        given = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": prompt,
            "strftime_now": (now or datetime.datetime.now()).strftime,
        }
        # the template is a program of somebody else's
        with refused("the chat template refuses these messages"):
            return self._template.render(**self._special, **given)


def _is_message(message: object) -> bool:
    """A template would write a content that is no text as Python does: `None`, `[{'type': ...`.
    What tools are called with, and answer, may be anything.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    of_tools = message["role"] in TOOLS or message.get("tool_calls")
    return isinstance(message.get("content"), str) or bool(of_tools)


def _environment():
    """What Hugging Face documents for templates
    (https://huggingface.co/docs/transformers/chat_templating_writing).
    """
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here it is what stands in
        it.
        """

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    extensions = [Generation, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # Jinja's own escapes HTML, which a prompt is not
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str):
    raise ValueError(message)
