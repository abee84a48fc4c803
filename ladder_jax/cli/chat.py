"""A conversation in the terminal, or one answer to standard input."""

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.config import DecodeConfig
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Engine, Finish, NoNumbers, Request, Result
from ladder_jax.errors import UserError
from ladder_jax.terminal import Say

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclasses.dataclass
class Conversation:
    """The messages so far, and the engine that answers them. ends: what ends a text. say: shows
    notices to the user; show: a piece of an answer.
    """

    engine: Engine
    tokenizer: Tokenizer
    settings: DecodeConfig
    ends: dict[str, Sequence]
    say: Say
    show: Callable[[str], None]
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    answers: int = 0

    def ask(self, text: str, *, stopped: Callable[[], bool] = lambda: False) -> Result:
        """The answer, shown piece by piece until it ends or `stopped`; the messages keep the part
        that was shown.

        Where the history exceeds the engine's capacity, its oldest exchanges are dropped. Raises
        UserError, without keeping `text`, where `text` alone is too long or the chat template
        refuses it.
        """
        prompt, kept = self._fit([*self.messages, {"role": "user", "content": text}])
        request = Request.of(prompt, config=self.settings, index=self.answers, **self.ends)
        self.answers += 1
        handle = self.engine.submit(request)
        for piece in handle:
            self.show(piece.text)
            if stopped():
                handle.cancel()
        result = handle.result()
        self.messages = [*kept, {"role": "assistant", "content": result.text}]
        return result

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[int], list[dict[str, str]]]:
        """The prompt, and the messages that it holds."""
        new = self.settings.max_new_tokens
        before = len(messages)
        while len(prompt := self.tokenizer.chat(messages)) + new > self.engine.capacity:
            if len(messages) < 3:
                raise UserError(
                    f"the message makes a prompt of {len(prompt)} tokens; with {new} new ones it does not fit into"
                    f" --context {self.engine.capacity}"
                )
            messages = messages[2:]  # a question and its answer
        if dropped := before - len(messages):
            self.say(
                f"(forgot the oldest {dropped} messages: --context {self.engine.capacity} is full)"
            )
        return prompt, messages


def answer(conversation: Conversation, message: str) -> None:
    """Show the answer. Ctrl-C stops it at its next tokens; a second one ends the program."""
    with _interruptible() as interrupted:
        result = conversation.ask(message, stopped=interrupted.is_set)
    print()
    if result.finish is Finish.CANCELLED:
        conversation.say("(stopped)")
    elif result.finish is Finish.LENGTH:
        conversation.say(f"(cut after {len(result.tokens)} tokens; --max-new-tokens allows more)")


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets. An exception could break a lock on which this thread waits."""
    pressed = threading.Event()

    def notice(*_):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        pressed.set()

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def talk(conversation: Conversation) -> None:
    """Read messages from the terminal and answer them, until the user leaves."""
    say = conversation.say
    say(HELP)
    while (line := _read()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            conversation.messages = []
        elif line.startswith("/"):
            say(f"(unknown command {line.split()[0]}: {HELP})")
        elif line:
            try:
                answer(conversation, line)
            except (UserError, NoNumbers) as error:
                say(f"({error})")
    print()


def _read() -> str | None:
    """The next line, stripped; None at the end of input. Ctrl-C discards the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has editing and history)
    try:
        return input("> ").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def piped() -> str | None:
    """The message on standard input; None for a terminal. Raises UserError for an empty message."""
    if sys.stdin and sys.stdin.isatty():  # None where it is closed
        return None
    try:
        text = sys.stdin.buffer.read().decode("utf-8").strip() if sys.stdin else ""
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8 text") from None
    if not text:
        raise UserError("--chat needs a message on standard input, or a terminal")
    return text
