"""What each verb is called with: a line for `--help`, an example, its arguments, and its
function.
"""

import argparse
import dataclasses
import enum
import functools
import math
import pkgutil
from collections.abc import Mapping
from typing import Any

from ladder_jax.config import (
    CollectiveMatmul,
    Dtype,
    ExpertParallelism,
    Interleave,
    Launch,
    Loop,
    Phase,
    Quantize,
    Remat,
)
from ladder_jax.config.fields import member
from ladder_jax.errors import UserError
from ladder_jax.processes.options import SETTINGS

type Arguments = Mapping[str, str | dict[str, Any]]
"""By usage, as in "--out FILE", "--json" (a flag) or "run RUN" (a positional): the help, or
argparse's settings.
"""


@dataclasses.dataclass(frozen=True)
class Verb:
    """work: "module:function", imported when the verb runs, as it may be slow; it takes the
    arguments, a dict by name.
    """

    summary: str
    example: str
    work: str
    arguments: Arguments

    def declare(self, parser: argparse.ArgumentParser) -> None:
        for usage, given in self.arguments.items():
            name, _, metavar = usage.partition(" ")
            settings = dict(help=given) if isinstance(given, str) else dict(given)
            kind = settings.get("type")
            if isinstance(kind, enum.EnumMeta):
                settings["type"] = functools.partial(member, kind, name)
            form = dict(metavar=metavar) if metavar else dict(action="store_true")
            parser.add_argument(name, **form, **settings)

    def run(self, arguments: dict[str, Any]) -> None:
        pkgutil.resolve_name(self.work)(arguments)


class _Positive(argparse.Action):
    def __call__(self, parser, namespace, value, option_string=None):
        if not 0 < value < math.inf:
            raise UserError(f"{self.option_strings[0]} must be positive, not {value}")
        setattr(namespace, self.dest, value)


def typed(kind: type, help: str, **settings: Any) -> dict[str, Any]:
    """argparse's settings of an option whose words `kind` turns into its value."""
    return dict(help=help, type=kind, **settings)


needed = functools.partial(typed, str, required=True)
number = functools.partial(typed, int)
count = functools.partial(typed, int, action=_Positive)
real = functools.partial(typed, float)
positive = functools.partial(typed, float, action=_Positive)
repeated = functools.partial(typed, str, action="append")

JSON = {"--json": "print one JSON object"}
OPENED = {
    "checkpoint MODEL": "a run's folder, a Hugging Face folder, a GGUF file, or org/name of the Hub",
    "--ladder-layers WHICH": "make these ladder layers, in memory: N (the last N), i,j or all",
    "--residual NAME": "the kind of those layers (default ladder)",
    "--ranks N": count("for ladder-fresh: the tensor-parallel ranks it is for"),
    "--tensor N": count("tensor-parallel devices (default: as trained, if there are as many)"),
}
DECODED = {
    **OPENED,
    "--quantize QUANTIZE": typed(
        Quantize, "int8: the weights in 8 bits; none (default: the run's, else none)"
    ),
    "--launch LAUNCH": typed(
        Launch, "of hidden all-reduces: explicit, chained, or auto (default: the run's, else auto)"
    ),
    "--interleave N": typed(
        Interleave,
        "2: read prompts in two halves in turn; auto: where predicted to be faster; 1 (default: the run's, else 1)",
    ),
}
MODEL = {
    "--model MODEL": needed("a preset, such as llama-3-70b, a config file, or any model"),
}
CAPACITY = {
    "--capacity C": positive("of --experts exchange: an expert's rows, at most, over the mean")
}
LAYERS = {"--layers N": count("layers (default: the model's)")}

VERBS = {
    "doctor": Verb(
        "Say what this machine has, and what is missing.",
        "ladder-jax doctor --json",
        "ladder_jax.cli.doctor:run",
        JSON,
    ),
    "train": Verb(
        "Train a model, or resume the run from its last checkpoint.",
        "ladder-jax train tiny --cpu-devices 8 mesh.data=2 mesh.tensor=4 data.path=book.txt",
        "ladder_jax.cli.train:run",
        {
            "config CONFIG": "a YAML or JSON file, or a preset's name",
            "overrides path.to.field=value": dict(
                nargs="*", help="settings that replace the file's"
            ),
            "--profile STEPS": "trace these steps into run.dir/profile: 10:13, or 10",
            # SLURM, Open MPI, Kubernetes and Cloud TPU are recognised without them
            **{f"{setting.option} {setting.metavar}": setting.help for setting in SETTINGS},
        },
    ),
    "checkpoints": Verb(
        "List a run's checkpoints, verify them, prune them.",
        "ladder-jax checkpoints runs/tiny --verify",
        "ladder_jax.checkpoint.command:run",
        {
            "run RUN": "a run's folder",
            "--verify": "compare every file with what was written",
            "--prune RULES": "verify, and keep only these: last=3,every=1000,best=1",
            **JSON,
        },
    ),
    "convert": Verb(
        "Convert a pretrained model to a checkpoint, with ladder layers where they are asked for.",
        "ladder-jax convert SmolLM2-135M.gguf runs/smollm2 --ladder-layers 15 --calibration text.txt",
        "ladder_jax.pretrained.convert:run",
        {
            "source SOURCE": OPENED["checkpoint MODEL"],
            "destination DESTINATION": "the folder to write, which must not be there yet",
            "--ladder-layers WHICH": "N: the last N; i,j: 0-based layers; all; auto:N: chosen by what they cost on"
            " --calibration",
            "--residual NAME": "the kind of those layers (default ladder)",
            "--ranks N": count("for ladder-fresh: the tensor-parallel ranks it is for"),
            "--dtype DTYPE": typed(
                Dtype,
                "compute in bfloat16 or float32 (default: as the source; values stay as stored)",
            ),
            "--to FORMAT": dict(
                default="checkpoint", help="checkpoint (the default) or huggingface"
            ),
            "--calibration FILE[:WEIGHT]": repeated(
                "a text to refit the layers on (for auto:N, to choose them by, too); may be given again, and WEIGHT"
                " (default 1) is its share of the tokens"
            ),
            "--calibration-tokens N": count(
                "how many of its tokens (default 16384; to choose 2048)"
            ),
            "--refit WHAT": "inputs: fit the converted layers' first projections; both: their output projections, too"
            " (the default with 8 tokens for each of their features, else inputs); none",
            "--ridge X": real("of the refit: how near it stays (default 0.001)"),
            "--search HOW": "for auto:N: ranked, or greedy too (the default, and slower)",
            "--tensor N": count("for --calibration: tensor-parallel devices to use"),
            **JSON,
        },
    ),
    "tokenize": Verb(
        "Turn text into a token store for training, or go on with one.",
        "ladder-jax tokenize books/ web.jsonl.gz --out stores/books --tokenizer SmolLM2-135M",
        "ladder_jax.data.store.build:run",
        {
            "source SOURCE": dict(
                nargs="+",
                help="a text file, .jsonl, .jsonl.gz, .parquet, .csv, .tsv, .arrow, .tar (WebDataset), a folder of"
                " them (hidden ones apart), or hf://datasets/OWNER/NAME[@REVISION]",
            ),
            "--out DIR": needed("the store's folder"),
            "--tokenizer TOKENIZER": dict(
                default="bytes", help="bytes (the default), or a folder with tokenizer.json"
            ),
            "--field FIELD": dict(
                default="text", help="where JSON lines and tables hold the text (default: text)"
            ),
            "--subset NAME": "of a data set of the Hub (default: its only one)",
            "--split NAME": "of a data set of the Hub (default: train)",
            "--part I/N": "make the I-th of N parts; the command without --part then joins all of them",
            "--workers N": count("processes (default: one a core)"),
            "--shard-tokens N": count(
                "tokens a file, about (default 268,435,456)", default=268_435_456
            ),
            "--verify": "read the finished store, and compare its checksums",
        },
    ),
    "generate": Verb(
        "Continue prompts with a model: a checkpoint, or one of Hugging Face or llama.cpp.",
        'ladder-jax generate runs/tiny --prompt "Once" --temperature 0.8 --seed 1',
        "ladder_jax.cli.generate:run",
        {
            "--prompt TEXT": repeated("text to continue; may be given again"),
            "--prompts FILE": 'JSON lines such as {"prompt": "Once", "temperature": 0.8}, or of OpenAI\'s batch format',
            "--out FILE": "for --prompts: a JSON line as each finishes; a second run goes on with it",
            "--chat": "a conversation, or one answer to standard input",
            "--stream": "print one prompt's text as it comes",
            "--max-new-tokens N": count("how many tokens to add (default: the run's, else 128)"),
            "--temperature T": real("0 is greedy (default: the run's, else 0)"),
            "--top-k K": number(
                "only the K most probable tokens (default: the run's, else 0: all)"
            ),
            "--top-p P": real(
                "only the most probable tokens that together reach P (default: the run's, else 1: all)"
            ),
            "--min-p P": real(
                "only tokens at least P times as probable as the best (default: the run's, else 0: all)"
            ),
            "--repetition-penalty R": real(
                "above 1, tokens in the prompt or text become less likely (default: the run's, else 1)"
            ),
            "--seed S": number("the same seed gives the same text (default: the run's, else 0)"),
            "--slots N": count("prompts that are continued at the same time (default 8)"),
            "--context S": count(
                "for --chat: tokens of history and answer together (default 2048)"
            ),
            "--stop TEXT": repeated("end before this text; may be given again"),
            **DECODED,
        },
    ),
    "evaluate": Verb(
        "Measure perplexity, multiple choice or written answers of a model, as lm-evaluation-harness does.",
        "ladder-jax evaluate runs/tiny --text book.txt --window 512 --stride 256",
        "ladder_jax.evaluate.command:run",
        {
            "--text FILE": "perplexity of a text file; of .jsonl, .jsonl.gz, .parquet, .csv or a folder, each document"
            " by itself",
            "--multiple-choice FILE": 'JSON lines such as {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}',
            "--generation FILE": 'JSON lines such as {"question": "2 + 2 =", "answer": "#### 4"}; greedy',
            "--out FILE": "a JSON line as each window or question is done; a second run goes on with it",
            "--shots-file FILE": "questions with answers to put before each question, in the file's own form",
            "--window N": count(
                "the most tokens that the model reads at once (default: as it was trained)"
            ),
            "--stride N": count(
                "of --text: tokens that each later window scores (default: all of it)"
            ),
            "--shots N": count(
                "the first N questions of --shots-file stand before each question (default 0)"
            ),
            "--limit N": count("only the first N questions"),
            "--max-new-tokens N": count("of --generation: the longest answer (default 256)"),
            "--slots N": count(
                "of --generation: answers that are written at the same time (default 8)"
            ),
            "--batch-tokens N": count("tokens a batch, padding included (default 4096)"),
            "--prefix-token ID": number(
                "the token before a text's first (default: the tokenizer's BOS, or EOS; a newline byte)"
            ),
            "--data N": count("copies of the model, each with its share of a batch (default 1)"),
            "--field NAME": "where --text's JSON lines and tables hold it (default: text)",
            "--stop TEXT": repeated("ends an answer; may be given again (default: GSM8K's)"),
            **OPENED,
            **JSON,
        },
    ),
    "serve": Verb(
        "Serve a model over HTTP, to OpenAI's clients.",
        "ladder-jax serve runs/tiny --port 8000",
        "ladder_jax.cli.serve:run",
        {
            "--host ADDRESS": dict(
                default="127.0.0.1", help="where to listen (default 127.0.0.1: this machine only)"
            ),
            "--port N": number("default 8000; 0: any free one", default=8000),
            "--api-key KEY": "what clients must send; better set as LADDER_JAX_API_KEY (default: no key)",
            "--model-name NAME": "the model's name for clients (default: the run's)",
            "--slots N": count(
                "prompts that are continued at the same time (default 8)", default=8
            ),
            "--capacity N": count(
                "the most tokens of a request, prompt and new ones together (default 2048)",
                default=2048,
            ),
            "--chunk N": count(
                "tokens a slot makes at once: fewer stream evenly, more serve faster (default 16)",
                default=16,
            ),
            "--max-new-tokens N": count(
                "the most that a request may ask for (default: the capacity)"
            ),
            "--max-queue N": count("prompts that may wait for a slot (default 256)", default=256),
            "--drain-seconds S": real(
                "how long SIGTERM waits for requests in progress (default 30)", default=30.0
            ),
            **DECODED,
        },
    ),
    "overlap": Verb(
        "Compile for a target that need not be here, and say how much of the communication is hidden.",
        "ladder-jax overlap --model llama-3-70b --target v5p:2x2x2 --phase decode --residual ladder --layers 4",
        "ladder_jax.overlap.result:run",
        {
            **MODEL,
            "--target TARGET": needed("v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, h100:8, b200:8"),
            "--phase PHASE": typed(Phase, "prefill, decode or train", required=True),
            "--residual NAME": needed("standard, ladder, ladder-fresh, ..."),
            "--ladder-layers WHICH": "a hybrid: N (the last N layers), i,j or all",
            "--loop LOOP": typed(Loop, "scan or unrolled (default: unrolled; scan for train)"),
            "--remat REMAT": typed(
                Remat, "for train: none (the default), full, save-matmuls or offload"
            ),
            "--launch LAUNCH": typed(
                Launch, "for prefill and decode: explicit, chained, or auto (the default)"
            ),
            "--quantize QUANTIZE": typed(
                Quantize, "for prefill and decode: int8, the weights in 8 bits; none (the default)"
            ),
            **LAYERS,
            "--tensor N": count("tensor-parallel devices (default: all of the target's)"),
            "--fsdp N": count("for train: split every parameter over N devices more (default 1)"),
            "--batch B": count(
                "rows, on each of the fsdp devices (default: 16 for decode, else 1)"
            ),
            "--prompt-length P": count("tokens a row in prefill and train (default 1024)"),
            "--context S": count(
                "for decode and prefill: cache positions a row (default: 2048, or the prompt's)"
            ),
            "--sequence-parallel": "for train and prefill: split the stream along the sequence",
            "--collective-matmul FORM": typed(
                CollectiveMatmul, "with --sequence-parallel: none (the default) or ring"
            ),
            "--interleave N": number(
                "for train and prefill: 2 takes two halves of the rows in turn"
            ),
            "--experts FORM": typed(
                ExpertParallelism, "with --sequence-parallel: reduce (the default) or exchange"
            ),
            **CAPACITY,
            **JSON,
            "--plot FILE": "draw two layers' timeline, Standard above NAME (PNG, SVG, PDF)",
            "--trace FILE": "write the timelines for https://ui.perfetto.dev",
        },
    ),
    "plan": Verb(
        "Say which meshes, remat policies and microbatches of a training step fit a target's memory, the fastest"
        " first.",
        "ladder-jax plan --model llama-3-70b --target v5p:4x4x4 --tokens 4194304 --sequence 8192",
        "ladder_jax.plan.plans:run",
        {
            **MODEL,
            "--target TARGET": needed(
                "v5p:4x4x4, v6e:4x4, tpu7x:2x2x1, h100:8, b200:16, cpu:8, ..."
            ),
            "--tokens N": dict(count("of one optimizer step, over all devices"), required=True),
            "--sequence T": dict(count("tokens a sequence (default 2048)"), default=2048),
            "--residual NAME": "standard, ladder, ... (default: the model's)",
            **LAYERS,
            "--capacity C": positive(
                "an expert's rows, at most, over the mean (default: the model's); exchanging rows (mesh.experts)"
                " needs it"
            ),
            "--interleave N": typed(
                Interleave,
                "1: whole microbatches, 2: two halves in turn, auto (the default): both",
                default=Interleave.AUTO,
            ),
            "--confirm N": number(
                "compile the training step of the N best that fit, for the target (default 1; 0: estimate only)",
                default=1,
            ),
            **JSON,
        },
    ),
    "bench": Verb(
        "Time prefill and decode of residual topologies in turns, and hold them to the device's own limits.",
        "ladder-jax bench --model llama-3.2-1b --residual standard,ladder --batch 1,16 --plot speed.png",
        "ladder_jax.bench.result:run",
        {
            "--model MODEL": needed("a preset, a config file, or any model; weights are random"),
            "--residual NAME[,NAME]": needed("standard, ladder, ladder-fresh, ..."),
            "--batch B[,B]": dict(default="1,4,16,64", help="rows at once (default 1,4,16,64)"),
            "--interleave N[,N]": dict(
                default="1",
                help="1,2 times each prefill as a whole batch and in two halves (default 1)",
            ),
            "--prompt-length P": count("tokens a row in the prompt (default 1024)"),
            "--new-tokens G": count("tokens a row to generate (default 512)"),
            "--tensor N": count("tensor-parallel devices (default: all)"),
            "--share N": count(
                "on one device: a rank's share of tensor parallelism over N, without the wire"
            ),
            "--warmup W": count("generations before those that are timed (default 5)"),
            "--repeats R": count("generations that are timed (default 10)"),
            **LAYERS,
            **JSON,
            "--out FILE": "write that object to a file",
            "--plot FILE": "draw tokens/s by batch (PNG, SVG, PDF)",
        },
    ),
    "predict": Verb(
        "Say how fast each residual topology would be on a machine that need not be here, and which to take.",
        "ladder-jax predict --model llama-3-70b --hardware h100-nvlink --tensor 8 --batch 16",
        "ladder_jax.predict.result:run",
        {
            **MODEL,
            "--hardware NAME": needed("h100-nvlink, h100-no-nvlink, v5e, ... or a YAML file"),
            "--residual NAME[,NAME]": "standard, ladder, ... (default: all)",
            "--ladder-layers WHICH": "hybrids: N (the last N layers), i,j or all",
            "--phase NAME": "generate (the default), prefill or train",
            "--launch NAME": typed(
                Launch,
                "how hidden all-reduces are launched: explicit, chained, or auto (the default)",
            ),
            "--interleave N": typed(
                Interleave,
                "of prefill and training: 1 (the whole batch), 2 (two halves in turn), or auto (the default)",
            ),
            "--experts FORM": typed(
                ExpertParallelism, "with --phase prefill or train: reduce (the default) or exchange"
            ),
            **CAPACITY,
            "--tensor N": count("tensor-parallel devices (default: all of the hardware's)"),
            "--batch B": count("rows at once (default 1)"),
            "--prompt-length P": count("tokens a row in the prompt (default 1024)"),
            "--new-tokens G": count("tokens a row to generate (default 512)"),
            "--sequence T": count("tokens a row with --phase train (default 2048)"),
            **LAYERS,
            **JSON,
            "--plot FILE": "draw where the time goes (PNG, SVG, PDF)",
        },
    ),
    "calibrate": Verb(
        "Measure this machine's constants, and write them as hardware for predict.",
        "ladder-jax calibrate --out mine.yaml && ladder-jax predict --model llama-3-8b --hardware mine.yaml",
        "ladder_jax.predict.calibrate:run",
        {
            "--out FILE": needed("the YAML file to write"),
            "--tensor N": count("devices whose all-reduces are measured (default: all)"),
            **JSON,
        },
    ),
}
"""In the order in which `--help` lists them."""
