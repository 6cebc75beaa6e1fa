"""Measure what DataParallel costs beside the bare module: ``python -m tests.one_process_speed``.

All contenders train the same GPT in one process, one step each in turn, so that whatever else the machine does meets
all of them. On CUDA devices torch's DataParallel takes part, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradserver import DataParallel
from gradserver.tools.demo.model import GPT
from gradserver.tools.demo.settings import VOCABULARY, Settings


def step_of(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Return a function that does one step of training, and waits for the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten().to(inputs.device))
        torch.autograd.backward(loss)
        optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def contenders(options: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the models that are compared, by their names. The first one is the measure."""

    def made() -> nn.Module:
        width, heads, blocks = options.width, options.heads, options.blocks
        return GPT(Settings(context=options.context, width=width, heads=heads, blocks=blocks, hidden=4 * width))

    if count := torch.cuda.device_count():
        devices = [f"cuda:{number}" for number in range(count)]
        found: dict[str, nn.Module] = {"module, 1 device": made().to(devices[0])}
        found["torch's DataParallel"] = nn.DataParallel(made().to(devices[0]))
        found[f"{count} devices"] = DataParallel(made(), devices)
        found["2 replicas on 1 device"] = DataParallel(made(), devices[:1] * 2)
        return found
    return {
        "module": made(),
        "1 replica": DataParallel(made(), ["cpu"]),
        "2 replicas that share": DataParallel(made(), ["cpu", "cpu"]),
        "2 replicas with a copy": DataParallel(made(), ["cpu", "cpu:1"]),
    }


def main() -> None:
    """Measure, and print a row for each contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("steps", 20), ("batch", 16), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("width", 256), ("blocks", 4), ("heads", 4), ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens = torch.randint(VOCABULARY, (options.batch, options.context + 1))
    tokens = tokens.cuda() if torch.cuda.is_available() else tokens
    models = contenders(options)
    steps = {name: step_of(model, tokens) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.steps + 2):
        for name, step in steps.items():
            began, before = time.perf_counter(), time.process_time()
            step()
            if number > 1:
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - before)
    first = next(iter(seconds))
    size = sum(parameter.numel() for parameter in models[first].parameters())
    print(f"{size / 1e6:.1f}M parameters, batch {options.batch}, {options.threads} threads, {options.steps} steps each")
    print(f"{'':<24}{'time of a step':>21}{'of the processor':>18}")
    for name, times in seconds.items():
        more = [_ratio(one[name], one[first]) - 1 for one in (seconds, processor)]
        print(f"{name:<24}{statistics.median(times) * 1e3:10.1f} ms {more[0]:+7.1%}{more[1]:+18.1%}")


def _ratio(own: list[float], bare: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(own, bare, strict=True))


if __name__ == "__main__":
    main()
