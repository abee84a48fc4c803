"""Text to tokens and back: bytes, or any Hugging Face tokenizer with its chat template."""

from ladder_jax.data.tokenizer.store import FOLDER as FOLDER
from ladder_jax.data.tokenizer.store import check_vocabulary as check_vocabulary
from ladder_jax.data.tokenizer.store import load as load
from ladder_jax.data.tokenizer.store import save as save
from ladder_jax.data.tokenizer.tokenizer import BYTES as BYTES
from ladder_jax.data.tokenizer.tokenizer import Bytes as Bytes
from ladder_jax.data.tokenizer.tokenizer import Tokenizer as Tokenizer
