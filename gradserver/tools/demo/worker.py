"""One process of a demo run: a worker that exchanges gradients, or without a coordinator the reference.

The runner starts it as ``python -m gradserver.tools.demo.worker``. It prints reports to standard output, a line each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import gradserver
from gradserver.tools.common.processes import reserve_stdout
from gradserver.tools.demo.corpus import Corpus
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.reports import Done, Ready, Report, Step, to_line
from gradserver.tools.demo.settings import PROMPT, Settings
from gradserver.tools.demo.train import train, validation_loss


def main() -> int:
    """Train with the settings of the arguments."""
    parser = parser_of("gradserver.tools.demo.worker")
    parser.add_argument("--url", help="the coordinator; without it this process trains on all rows, alone")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    arguments = parser.parse_args()
    settings: Settings = arguments.settings

    tell, corpus, model = prepare(settings, arguments.threads)
    tell(Ready(corpus.sha256))
    if arguments.url is None:
        steps = train(model, corpus, settings, range(settings.global_batch))
    else:
        steps = train_in_group(model, corpus, settings, arguments.url, arguments.rank)
    for step in steps:
        tell(step)
    if arguments.save is not None:
        torch.save(model.state_dict(), arguments.save)
    tell(assess(model, corpus, settings, arguments.rank, sample=arguments.url is not None))
    return 0


def train_in_group(model: GPT, corpus: Corpus, settings: Settings, url: str, rank: int) -> Iterator[Step]:
    """Train on this rank's rows, with gradients that are averaged over the group. This takes two lines."""
    name, wire = f"worker-{rank}", settings.wire
    with gradserver.connect(url, rank=rank, world_size=settings.workers, name=name, wire=wire) as worker:
        replica = gradserver.DistributedDataParallel(model, worker)
        yield from train(replica, corpus, settings, settings.rows_of(rank), lambda: replica.exchange_seconds)


def assess(model: GPT, corpus: Corpus, settings: Settings, rank: int, *, sample: bool) -> Done:
    """Report on the trained model. The replicas are identical: only rank 0 reports more than the hash."""
    digest = state_sha256(model)
    if rank != 0:
        return Done(digest)
    model.eval()
    loss = validation_loss(model, corpus, settings)
    if not sample:
        return Done(digest, loss)
    continuation = model.generate(PROMPT.encode(), settings.sample_bytes, seed=settings.seed)
    return Done(digest, loss, continuation.decode("utf-8", "replace"))


def parser_of(program: str) -> argparse.ArgumentParser:
    """Make a parser of the arguments that all training processes have."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--settings", type=Settings.from_json, required=True, help="as Settings.to_json writes")
    parser.add_argument("--threads", type=int, required=True, help="threads that torch may use in training")
    return parser


def prepare(settings: Settings, threads: int) -> tuple[Callable[[Report], None], Corpus, GPT]:
    """Reserve standard output for reports. Return a function that sends one, the text, and a new model."""
    say = reserve_stdout()
    torch.set_num_threads(threads)
    return lambda report: say(to_line(report)), Corpus.standard_library(settings.context, settings.seed), GPT(settings)


if __name__ == "__main__":
    sys.exit(main())
