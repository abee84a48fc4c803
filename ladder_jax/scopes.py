"""The named scopes around the library's collectives, and its mesh axes: by them a compiled program
can be read.
"""

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")

# The two places where a topology communicates: the outputs, forward, and (the gradients of) the
# inputs, backward. PREVIOUS stands inside LAUNCH where the output reduced is not the step's own but
# that of the sublayer before it; FOLLOWING inside ENTER where the input is that of the sublayer
# after it (or, after the last, the head's).
LAUNCH, ENTER, PREVIOUS, FOLLOWING = (
    "launch_sublayer_output",
    "enter_sublayer_input",
    "previous",
    "following",
)

# Where a ring of permutes stands in place of one of these, beside the chunks of its matmul (see
# parallel/ring.py): what its permutes carry is gathered, or scattered.
RING_GATHER, RING_SCATTER = "ring_gather", "ring_scatter"

# And the two of parameters that are split over the fsdp axis (see `unshard`).
GATHER, SCATTER = "gather_weights", "scatter_gradients"

# The other places, by what they communicate for: schedule/judge.py has the words. TOKEN_LOOP is
# around the loop over new tokens, so that a program of several is counted a token.
EMBEDDING, HEAD, LOSS, DIVERGENCE = "embedding_lookup", "head_input", "cross_entropy", "divergence"
SHARED_GRADIENTS, DATA_GRADIENTS, GRADIENT_NORM = (
    "shared_gradients",
    "data_parallel_gradients",
    "gradient_norm",
)
CHOICE, TOKEN_LOOP, QK_NORM = "choose_token", "token_loop", "query_key_norm"
