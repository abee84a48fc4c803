"""The named scopes around the library's collectives, and its mesh axes: by them a compiled program
can be read.
"""

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")

# The two places where a topology communicates: the outputs, forward, and (the gradients of) the
# inputs, backward. PREVIOUS stands inside LAUNCH where the output reduced is not the step's own but
# that of the sublayer before it; FOLLOWING inside ENTER where the input is that of the sublayer
# after it (or, after the last, the head's).
LAUNCH = "launch_sublayer_output"
ENTER = "enter_sublayer_input"
PREVIOUS = "previous"
FOLLOWING = "following"

# Where a ring of permutes stands in place of one of these, beside the chunks of its matmul (see
# parallel/ring.py): what its permutes carry is gathered, or scattered.
RING_GATHER = "ring_gather"
RING_SCATTER = "ring_scatter"

# And the two of parameters that are split over the fsdp axis (see `unshard`).
GATHER = "gather_weights"
SCATTER = "scatter_gradients"

# The other places, by what they communicate for: schedule/judge.py has the words. TOKEN_LOOP is
# around the loop over new tokens, so that a program of several is counted a token.
EMBEDDING = "embedding_lookup"
HEAD = "head_input"
LOSS = "cross_entropy"
DIVERGENCE = "divergence"
SHARED_GRADIENTS = "shared_gradients"
DATA_GRADIENTS = "data_parallel_gradients"
GRADIENT_NORM = "gradient_norm"
CHOICE = "choose_token"
TOKEN_LOOP = "token_loop"
QK_NORM = "query_key_norm"
