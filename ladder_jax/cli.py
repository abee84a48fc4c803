"""`ladder-jax <verb>`: one thin function a verb."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ladder_jax.errors import RunFailed, UserError, unknown

SIMULATION_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


class Parser(argparse.ArgumentParser):
    """Argparse whose mistakes are one line, with the nearest match."""

    def parse_known_args(self, args=None, namespace=None):
        # First of all, so that a misspelt option is not reported as a missing one.
        known = [option for action in self._actions for option in action.option_strings]
        for word in args if self._subparsers is None else ():
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                raise unknown("option", name, [option for option in known if option.startswith("--")])
        namespace, rest = super().parse_known_args(args, namespace)
        # Argparse ends a list of positionals at the first option; a user may go on after it.
        for action in self._actions:
            if action.nargs == "*" and not action.option_strings:
                more = [word for word in rest if not word.startswith("-")]
                setattr(namespace, action.dest, [*getattr(namespace, action.dest), *more])
                rest = [word for word in rest if word not in more]
        return namespace, rest

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 for a failure, 2 for the user's mistakes, 128 + n after signal n."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
            raise unknown("verb", argv[0], VERBS)
        args = _parser().parse_args(argv)
        prepare_devices(getattr(args, "cpu_devices", None))
        VERBS[args.verb](args)
    except UserError as error:
        print(f"ladder-jax: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"ladder-jax: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("ladder-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ladder-jax generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def _parser() -> Parser:
    from ladder_jax import __version__

    parser = Parser(
        prog="ladder-jax", description="Ladder Residual: tensor parallelism that does not wait for the wire."
    )
    parser.add_argument("--version", action="version", version=f"ladder_jax {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)

    def verb(name: str, summary: str, example: str) -> Parser:
        sub = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--cpu-devices", type=int, metavar="N", help="simulate N devices on the CPU")
        return sub

    doctor = verb("doctor", "Say what this machine has, and what is missing.", "ladder-jax doctor --json")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    train = verb(
        "train",
        "Train a model, or go on where the run's last checkpoint stands.",
        "ladder-jax train tiny --cpu-devices 8 mesh.data=2 mesh.tensor=4 data.path=book.txt run.dir=runs/book",
    )
    train.add_argument("config", metavar="CONFIG", help="a YAML or JSON file, or a preset's name")
    train.add_argument("overrides", nargs="*", metavar="path.to.field=value", help="settings that replace the file's")

    train.add_argument("--profile", metavar="STEPS", help="trace these steps into run.dir/profile: 10:13, or 10")

    checkpoints = verb(
        "checkpoints",
        "List a run's checkpoints, verify them, prune them.",
        "ladder-jax checkpoints runs/tiny --verify",
    )
    checkpoints.add_argument("run", metavar="RUN", help="a run's folder")
    checkpoints.add_argument("--verify", action="store_true", help="compare every file with what was written")
    checkpoints.add_argument("--prune", metavar="RULES", help="verify, and keep only these: last=3,every=1000,best=1")
    checkpoints.add_argument("--json", action="store_true", help="print one JSON object")

    tokenize = verb(
        "tokenize",
        "Turn text into a token store for training, or go on with one.",
        "ladder-jax tokenize books/ web.jsonl.gz --out stores/books --tokenizer SmolLM2-135M",
    )
    tokenize.add_argument(
        "source", nargs="+", metavar="SOURCE", help="a text file, .jsonl, .jsonl.gz, .parquet, or a folder of them"
    )
    tokenize.add_argument("--out", required=True, metavar="DIR", help="the store's folder")
    tokenize.add_argument("--tokenizer", default="bytes", help="bytes (the default), or a folder with tokenizer.json")
    tokenize.add_argument("--field", default="text", help="where JSON lines and Parquet hold the text (default: text)")
    tokenize.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    tokenize.add_argument("--shard-tokens", type=int, metavar="N", help="tokens a file, about (default 268,435,456)")
    tokenize.add_argument("--verify", action="store_true", help="read the finished store, and compare its checksums")

    generate = verb(
        "generate",
        "Continue prompts with a trained checkpoint.",
        'ladder-jax generate runs/tiny --prompt "def main(" --temperature 0.8 --seed 1',
    )
    generate.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder, or one checkpoint in it")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given again")
    generate.add_argument("--prompts", metavar="FILE", help='JSON lines such as {"prompt": "Once", "temperature": 0.8}')
    generate.add_argument(
        "--out", metavar="FILE", help="for --prompts: a JSON line as each finishes; a second run goes on with it"
    )
    generate.add_argument("--chat", action="store_true", help="a conversation, or one answer to standard input")
    generate.add_argument("--stream", action="store_true", help="print one prompt's text as it comes")
    for option, kind, letter, text in (
        ("max-new-tokens", int, "N", "how many tokens to add (default 128)"),
        ("temperature", float, "T", "0 is greedy (the default)"),
        ("top-k", int, "K", "only the K most probable tokens (default 0: all)"),
        ("top-p", float, "P", "only the most probable tokens that together reach P (default 1: all)"),
        ("min-p", float, "P", "only tokens at least P times as probable as the best (default 0: all)"),
        ("repetition-penalty", float, "R", "above 1, what was there before becomes less likely (default 1)"),
        ("seed", int, "S", "the same seed gives the same text (default 0)"),
        ("slots", int, "N", "prompts that are continued at the same time (default 8)"),
        ("context", int, "S", "for --chat: tokens of history and answer together (default 2048)"),
    ):
        generate.add_argument(f"--{option}", type=kind, metavar=letter, help=text)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    generate.add_argument(
        "--tensor", type=int, metavar="N", help="tensor-parallel devices (default: as trained, if there are as many)"
    )
    generate.add_argument("--quantize", help="int8: the weights in 8 bits; none (the default)")

    serve = verb(
        "serve",
        "Serve a trained checkpoint over HTTP, to OpenAI's clients.",
        "ladder-jax serve runs/tiny --port 8000",
    )
    serve.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's folder, or one checkpoint in it")
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
        serve.add_argument(f"--{option}", type=kind, metavar=letter, default=default, help=text)

    overlap = verb(
        "overlap",
        "Compile for a target that need not be here, and say how much of the communication is hidden.",
        "ladder-jax overlap --model llama-3-70b --target v5p:2x2x2 --phase decode --residual ladder --layers 4",
    )
    overlap.add_argument("--model", required=True, metavar="PRESET", help="a model preset, such as llama-3-70b")
    overlap.add_argument("--target", required=True, help="v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, h100:8, b200:8")
    overlap.add_argument("--phase", required=True, metavar="PHASE", help="prefill, decode or train")
    overlap.add_argument("--residual", required=True, metavar="NAME", help="standard, ladder, ladder-fresh, ...")
    overlap.add_argument("--ladder-layers", metavar="WHICH", help="a hybrid: N (the last N layers), i,j or all")
    overlap.add_argument("--loop", help="scan or unrolled (default: unrolled; scan for train)")
    overlap.add_argument("--remat", help="for train: none (the default), full or save-matmuls")
    overlap.add_argument("--launch", help="for decode: chained (the default), or explicit: by name, with jax 0.12")
    overlap.add_argument("--quantize", help="for prefill and decode: int8, the weights in 8 bits; none (the default)")
    for option, letter, text in (
        ("layers", "N", "layers (default: the preset's)"),
        ("tensor", "N", "tensor-parallel devices (default: all of the target's)"),
        ("fsdp", "N", "for train: split every parameter over N devices more (default 1)"),
        ("batch", "B", "rows, on each of the fsdp devices (default: 16 for decode, else 1)"),
        ("prompt-length", "P", "tokens a row in prefill and train (default 1024)"),
        ("context", "S", "cache positions a row in decode (default 2048)"),
    ):
        overlap.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    overlap.add_argument(
        "--sequence-parallel", action="store_true", help="for train and prefill: split the stream along the sequence"
    )
    overlap.add_argument("--json", action="store_true", help="print one JSON object")
    overlap.add_argument(
        "--plot", metavar="FILE", help="draw two layers' timeline, Standard above NAME (PNG, SVG, PDF)"
    )
    overlap.add_argument("--trace", metavar="FILE", help="write the timelines for https://ui.perfetto.dev")

    bench = verb(
        "bench",
        "Time prefill and decode of residual topologies in turns, and hold them to the device's own limits.",
        "ladder-jax bench --model llama-3.2-1b --residual standard,ladder --batch 1,16 --plot speed.png",
    )
    bench.add_argument("--model", required=True, metavar="PRESET", help="a model preset; its weights are random")
    bench.add_argument("--residual", required=True, metavar="NAME[,NAME]", help="standard, ladder, ladder-fresh, ...")
    bench.add_argument("--batch", metavar="B[,B]", help="rows at once (default 1,4,16,64)")
    for option, letter, text in (
        ("prompt-length", "P", "tokens a row in the prompt (default 1024)"),
        ("new-tokens", "G", "tokens a row to generate (default 512)"),
        ("tensor", "N", "tensor-parallel devices (default: all)"),
        ("warmup", "W", "generations before those that are timed (default 5)"),
        ("repeats", "R", "generations that are timed (default 10)"),
        ("layers", "N", "layers (default: the preset's)"),
    ):
        bench.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.add_argument("--out", metavar="FILE", help="write that object to a file")
    bench.add_argument("--plot", metavar="FILE", help="draw tokens/s and bandwidth by batch (PNG, SVG, PDF)")

    predict = verb(
        "predict",
        "Say how fast each residual topology would be on a machine that need not be here, and which to take.",
        "ladder-jax predict --model llama-3-70b --hardware h100-nvlink --tensor 8 --batch 16",
    )
    predict.add_argument("--model", required=True, metavar="PRESET", help="a model preset, such as llama-3-70b")
    predict.add_argument("--hardware", metavar="NAME", help="h100-nvlink, h100-no-nvlink, v5e, ... or a YAML file")
    predict.add_argument("--residual", metavar="NAME[,NAME]", help="standard, ladder, ... (default: all)")
    predict.add_argument("--ladder-layers", metavar="WHICH", help="hybrids: N (the last N layers), i,j or all")
    predict.add_argument("--implementation", metavar="NAME", help="ours (the default), or authors: the paper's")
    for option, letter, text in (
        ("tensor", "N", "tensor-parallel devices (default: all of the hardware's)"),
        ("batch", "B", "rows at once (default 1)"),
        ("prompt-length", "P", "tokens a row in the prompt (default 1024)"),
        ("new-tokens", "G", "tokens a row to generate (default 512)"),
        ("layers", "N", "layers (default: the preset's)"),
    ):
        predict.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    predict.add_argument(
        "--sweep", nargs="+", metavar="AXIS=A,B", help="vary tensor, batch, link: tensor=1,2,4,8 batch=1,16 link=0.5,1"
    )
    predict.add_argument("--from-schedule", metavar="TARGET", help="from compiled programs: v5p:2x2x2, h100:8, ...")
    predict.add_argument("--json", action="store_true", help="print one JSON object")
    predict.add_argument("--plot", metavar="FILE", help="draw where the time goes, or the sweep (PNG, SVG, PDF)")

    calibrate = verb(
        "calibrate",
        "Measure this machine's constants, and write them as hardware for predict.",
        "ladder-jax calibrate --out mine.yaml && ladder-jax predict --model llama-3-8b --hardware mine.yaml",
    )
    calibrate.add_argument("--out", required=True, metavar="FILE", help="the YAML file to write")
    for option, letter, text in (
        ("tensor", "N", "devices whose all-reduces are measured (default: all)"),
        ("warmup", "W", "runs before those that are timed (default 3)"),
        ("repeats", "R", "runs that are timed (default 10)"),
    ):
        calibrate.add_argument(f"--{option}", type=int, metavar=letter, help=text)
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def prepare_devices(cpu_devices: int | None) -> None:
    """Simulated devices must be asked for before jax starts. Many on few cores need patience to meet."""
    if cpu_devices is not None:
        if cpu_devices < 1:
            raise UserError(f"--cpu-devices must be positive, not {cpu_devices}")
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if os.environ.get("JAX_NUM_CPU_DEVICES") and SIMULATION_TIMEOUT.split("=")[0] not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SIMULATION_TIMEOUT}".strip()


def _doctor(args: argparse.Namespace) -> None:
    from ladder_jax import doctor

    report = doctor.examine()
    print(json.dumps(report.as_dict()) if args.json else report.as_text())


def _train(args: argparse.Namespace) -> None:
    from ladder_jax import config, train

    settings = config.load(args.config, overrides=args.overrides)
    steps = train.profile.parse(args.profile) if args.profile else None
    result = train.run(settings, say=lambda line: print(line, file=sys.stderr, flush=True), profile=steps)
    entropy = result.bigram_entropy
    unit = "token" if entropy is None else f"byte (the text's bigram entropy: {entropy:.4f})"
    print(
        f"trained {result.parameters:,} parameters for {result.steps} steps:"
        f" held-out loss {result.validation_loss:.4f} nats a {unit}"
    )


def _checkpoints(args: argparse.Namespace) -> None:
    from ladder_jax.checkpoint import command

    command.run(vars(args))


def _tokenize(args: argparse.Namespace) -> None:
    from ladder_jax.data.store import command

    command.run(vars(args))


def _generate(args: argparse.Namespace) -> None:
    from ladder_jax.decode import command

    command.run(vars(args))


def _serve(args: argparse.Namespace) -> None:
    from ladder_jax.serve import command

    command.run(vars(args))


def _overlap(args: argparse.Namespace) -> None:
    from ladder_jax.overlap import command

    command.run(vars(args))


def _bench(args: argparse.Namespace) -> None:
    from ladder_jax.bench import command

    command.run(vars(args))


def _predict(args: argparse.Namespace) -> None:
    from ladder_jax.predict import command

    command.run(vars(args))


def _calibrate(args: argparse.Namespace) -> None:
    from ladder_jax.predict.calibrate import command

    command.run(vars(args))


VERBS = {
    "doctor": _doctor,
    "train": _train,
    "checkpoints": _checkpoints,
    "tokenize": _tokenize,
    "generate": _generate,
    "serve": _serve,
    "overlap": _overlap,
    "bench": _bench,
    "predict": _predict,
    "calibrate": _calibrate,
}
