import argparse

SUMMARY = "Serve a trained checkpoint over HTTP, to OpenAI's clients."
EXAMPLE = "ladder-jax serve runs/tiny --port 8000"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder, or one checkpoint in it")
    for option, kind, letter, default, text in (
        ("host", str, "ADDRESS", "127.0.0.1", "where to listen (default 127.0.0.1: this machine only)"),
        ("port", int, "N", 8000, "default 8000; 0: any free one"),
        ("api-key", str, "KEY", None, "what clients must send; better set as LADDER_JAX_API_KEY (default: no key)"),
        ("model-name", str, "NAME", None, "the model's name for clients (default: the run's)"),
        ("slots", int, "N", 8, "prompts that are continued at the same time (default 8)"),
        ("capacity", int, "N", 2048, "the most tokens of a request, prompt and new ones together (default 2048)"),
        ("max-new-tokens", int, "N", None, "the most that a request may ask for (default: the capacity)"),
        ("max-queue", int, "N", 256, "prompts that may wait for a slot (default 256)"),
        ("drain-seconds", float, "S", 30.0, "how long SIGTERM waits for requests in progress (default 30)"),
        ("tensor", int, "N", None, "tensor-parallel devices (default: as trained, if there are as many)"),
        ("quantize", str, "NAME", None, "int8: the weights in 8 bits; none (the default)"),
    ):
        parser.add_argument(f"--{option}", type=kind, metavar=letter, default=default, help=text)


def run(args: argparse.Namespace) -> None:
    from ladder_jax.serve import command

    command.run(vars(args))
