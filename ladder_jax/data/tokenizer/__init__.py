"""Text to tokens and back: bytes, or any Hugging Face tokenizer with its chat template."""

from ladder_jax.data.tokenizer.tokenizer import BYTES as BYTES
from ladder_jax.data.tokenizer.tokenizer import FOLDER as FOLDER
from ladder_jax.data.tokenizer.tokenizer import Bytes as Bytes
from ladder_jax.data.tokenizer.tokenizer import Tokenizer as Tokenizer
from ladder_jax.data.tokenizer.tokenizer import check_vocabulary as check_vocabulary
from ladder_jax.data.tokenizer.tokenizer import load as load
from ladder_jax.data.tokenizer.tokenizer import save as save
