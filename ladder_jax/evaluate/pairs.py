"""From text to tokens, as lm-evaluation-harness does it: what is scored, and what stands before it.

Sources: lm_eval/api/model.py (TemplateLM.loglikelihood, _encode_pair) and lm_eval/models/huggingface.py (tok_encode,
prefix_token_id, _loglikelihood_tokens), version 0.4.13.
"""

from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.evaluate.scorer import Span

NEWLINE = 10  # a byte


def prefix_of(tokenizer: Tokenizer) -> int:
    """The token before a text's first: the one that begins a text, else the one that ends a document.

    Bytes have neither; there it is the newline, as after a line before. Raises UserError for other such tokenizers.
    """
    if tokenizer.begin_id is not None:
        return tokenizer.begin_id
    if tokenizer.stop_ids:
        return tokenizer.stop_ids[0]
    if tokenizer.name == BYTES:
        return NEWLINE
    raise UserError(
        "the tokenizer has no token that begins or ends a text, to stand before the first (--prefix-token ID names one)"
    )


def encode(text: str, *, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a whole text, with what the tokenizer puts around it; a beginning that is written out stands once."""
    tokens = tokenizer.encode(text)
    return tokens[1:] if tokens[:2] == [tokenizer.begin_id] * 2 else tokens


def pair(context: str, continuation: str, *, tokenizer: Tokenizer, prefix: int) -> Span:
    """The span whose log-likelihood is that of `continuation` after `context`.

    Spaces at the end of the context are moved to the continuation; then context + continuation is tokenized, and
    what it has beyond as many tokens as the context alone has is scored, after the tokens of the context alone. (Where
    the two meet within a token, these are not the first ones of the whole.) An empty context is the prefix token, or
    the continuation's own first token, where that is the prefix.

    Raises UserError where no token is left to be scored.
    """
    if stripped := context.rstrip():
        moved = context[len(stripped) :] + continuation
        before = encode(stripped, tokenizer=tokenizer)
        scored = encode(stripped + moved, tokenizer=tokenizer)[len(before) :]
    else:
        # The harness fails for a context of nothing but spaces; here it is an empty one.
        scored = tokenizer.encode_bare(context + continuation)
        before = [prefix]
        if scored[:1] == before:
            before, scored = scored[:1], scored[1:]
    if not before or not scored:
        raise UserError(f"{continuation!r} adds no token to what stands before it: nothing can be scored")
    return Span(before, scored)


def cut(span: Span, *, window: int) -> Span:
    """`span` without the tokens on its left that the model, reading at most `window`, has no room for.

    Raises UserError where what is scored alone is longer.
    """
    if len(span.scored) > window:
        raise UserError(f"a continuation of {len(span.scored)} tokens is longer than the window of {window}")
    return Span(span.context[max(0, span.length - window) :], span.scored)
