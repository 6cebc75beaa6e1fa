"""The measurements of `tests.gpu`, each in a process of its own: ``python -m tests.gpu_measurements NAME``.

A process prints one line of JSON: what `Found` has. All of them also run on the CPU, with a device of
`tests.fake_device` and small models (`tests.test_gpu`). So a typing mistake in them costs no time on a GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradserver
from gradserver.protocol.exchange import Op
from gradserver.protocol.limits import MIB
from gradserver.tools.bench import large
from gradserver.tools.bench.processes import Processes
from gradserver.tools.common.processes import listening_url, reserve_stdout
from gradserver.tools.demo.model import GPT
from gradserver.tools.demo.settings import Settings
from gradserver.worker.client import Worker
from gradserver.worker.devices.codecs import DEVICE_CODECS
from gradserver.worker.devices.cuda import CudaDevice
from gradserver.worker.devices.device import Device, Stream
from gradserver.worker.devices.memory import HostMemory
from gradserver.worker.devices.staged import PIECE_BYTES
from gradserver.worker.planes import staging
from gradserver.worker.planes.communicator import Communicator, Reduction, Signal
from tests.models import Convolutional, images, loss_of

LARGE = Settings(
    workers=2, batch=1, steps=3, context=32, width=1024, heads=16, blocks=24, hidden=3584, history=0, vocabulary=32768
)
"""The model of 432 million parameters."""
SMALL = replace(LARGE, width=64, heads=2, blocks=2, hidden=128, vocabulary=512, context=8)

_Cuda: Any = torch.cuda  # torch has not typed all of it


@dataclass
class Found:
    """Outcome of one measurement.

    Attributes:
        passed: true if it shows what it is to show; None if that is not a matter of yes or no.
        text: the figures, for people.
        figures: the figures.
        timeline: lines of a picture.
    """

    passed: bool | None
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    timeline: list[str] = field(default_factory=list)


class Gpu:
    """The device, and how time is measured there.

    Attributes:
        device: the device.
        scale: 1 for a real device; less for a rehearsal.
        patience: factor of time limits.
    """

    device = torch.device("cuda", 0)
    scale = 1.0
    patience = 1.0

    def open(self) -> Device:
        """Return it as copies see it."""
        return CudaDevice(self.device)

    def mark(self, stream: Any = None) -> Any:
        """Return an event with the time when the stream, by default the current one, has come this far."""
        event = _Cuda.Event(enable_timing=True)
        event.record(stream if stream is not None else torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks."""
        elapsed: float = begin.elapsed_time(end)
        return elapsed / 1e3

    def wait(self) -> None:
        """Wait for all that was queued."""
        torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        """Measure the most memory from now on."""
        torch.cuda.empty_cache()
        _Cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the most memory in use since then."""
        return int(_Cuda.max_memory_allocated(self.device))

    def refuse_waits(self, refuse: bool) -> None:
        """Raise an error where torch waits for the device, or do not."""
        torch.cuda.set_sync_debug_mode("error" if refuse else "default")

    def settings(self, **changes: Any) -> Settings:
        """Return the settings of the large model, or of a small one for a rehearsal."""
        return replace(LARGE if self.scale == 1 else SMALL, **changes)

    def sized(self, nbytes: int) -> int:
        """Return a size, or a smaller one for a rehearsal."""
        return max(int(nbytes * self.scale), MIB)


@contextmanager
def coordinator(workers: int, *options: str) -> Iterator[str]:
    """Run a coordinator. Yield its URL."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        serve = "-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", "--workers", str(workers)
        child = processes.start("coordinator", *serve, *options)
        yield listening_url(child, processes.lines([child], 60.0)[0])


@contextmanager
def over_the_host() -> Iterator[Worker]:
    """Connect a worker that is alone and shares memory with its coordinator, so that gradients cross the bus."""
    with coordinator(1) as url, gradserver.connect(url, 0, 1, plane="shm") as worker:
        yield worker


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, gpu: Gpu) -> Callable[[], None]:
    """Return a training step on tokens that are on the device already. Nothing in it waits for the device."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(settings.vocabulary, (settings.batch, settings.context + 1), generator=generator)
    inputs, targets = drawn[:, :-1].to(gpu.device), drawn[:, 1:].flatten().to(gpu.device)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(inputs).flatten(0, -2).float(), targets)
        loss.backward()
        optimizer.step()

    return step


def model_of(settings: Settings, gpu: Gpu, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on the device, and its optimizer."""
    model = GPT(settings).to(gpu.device, dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


# ── the measurements ──────────────────────────────────────────────────────────────────────────────────


def copies(gpu: Gpu) -> Found:
    """Pinned copies at 80 % or more of the rate of a plain copy, each way."""
    nbytes = gpu.sized(256 * MIB)
    device, stream = gpu.open(), gpu.open().new_stream()
    flat = torch.ones(nbytes, dtype=torch.uint8, device=gpu.device)
    plain = device.pinned(nbytes)
    with over_the_host() as worker:
        memory = HostMemory(device, worker._session.traffic.channel.empty)
        shared = memory.new(nbytes)
        locked = sum(one.nbytes for one in memory._locked)
        pieces = [(start, min(start + PIECE_BYTES, nbytes)) for start in range(0, nbytes, PIECE_BYTES)]
        ways: dict[str, Callable[[], object]] = {
            "to host, plain": lambda: device.copy(plain, flat, stream),
            "to host, ours": lambda: _by_pieces(device, shared, flat, pieces, stream),
            "to device, plain": lambda: device.copy(flat, plain, stream),
            "to device, ours": lambda: _by_pieces(device, flat, shared, pieces, stream),
        }
        rates = {name: nbytes / _best_seconds(gpu, copy, stream) for name, copy in ways.items()}
        gpu.wait()
        memory.release()
    to_host = rates["to host, ours"] / rates["to host, plain"]
    to_device = rates["to device, ours"] / rates["to device, plain"]
    text = (
        f"to the host {rates['to host, ours'] / 1e9:.1f} GB/s, {to_host:.0%} of a plain copy; to the device "
        f"{rates['to device, ours'] / 1e9:.1f} GB/s, {to_device:.0%}; shared memory is "
        f"{'registered' if locked else 'NOT registered'}"
    )
    return Found(min(to_host, to_device) >= 0.8 and locked > 0, text, {**rates, "locked_bytes": locked})


def _by_pieces(device: Device, target: Tensor, source: Tensor, pieces: Sequence[tuple[int, int]], stream: Any) -> None:
    for start, stop in pieces:
        device.copy(target[start:stop], source[start:stop], stream)
        stream.record_event(device.new_event())


def _best_seconds(gpu: Gpu, copy: Callable[[], object], stream: Any) -> float:
    taken = []
    for _ in range(8):
        begin = gpu.mark(stream)
        copy()
        end = gpu.mark(stream)
        gpu.wait()
        taken.append(gpu.seconds(begin, end))
    return min(taken[2:])


class Traced:
    """A device that notes when each copy runs."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._device = gpu, gpu.open()
        self.name = self._device.name
        self.new_stream, self.new_event = self._device.new_stream, self._device.new_event
        self.current_stream, self.keep, self.use = self._device.current_stream, self._device.keep, self._device.use
        self.lock, self.unlock, self.pinned = self._device.lock, self._device.unlock, self._device.pinned
        self.run, self.captures = self._device.run, self._device.captures
        self.copied: list[tuple[Stream, Any, Any, int]] = []

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy, with a mark before and behind."""
        begin = self._gpu.mark(stream)
        self._device.copy(target, source, stream)
        self.copied.append((stream, begin, self._gpu.mark(stream), source.nbytes))


def overlap(gpu: Gpu) -> Found:
    """Copies to the host are hidden behind backward."""
    settings = gpu.settings(batch=8, context=1024 if gpu.scale == 1 else 8)
    traced, ends, finish = Traced(gpu), list[Any](), staging.Staging.finish
    finished: list[staging.Staging] = []

    def noted(self: staging.Staging, measures: bool = False) -> Any:
        finished.append(self)
        ends.append(gpu.mark())  # before it waits for anything: this is the end of backward
        return finish(self, measures)

    patched: Any = staging
    opened = patched.open_device
    seen: Device = traced  # mypy checks that it has all that a device needs
    patched.open_device = lambda device: seen if device == gpu.device else opened(device)
    staging.Staging.finish = noted  # type: ignore[method-assign]
    try:
        with over_the_host() as worker:
            model, optimizer = model_of(settings, gpu, torch.bfloat16)
            step = step_of(gradserver.DistributedDataParallel(model, worker), optimizer, settings, gpu)
            for _ in range(3):
                step()
            gpu.wait()
            traced.copied.clear()
            begin = gpu.mark()
            step()
            gpu.wait()
    finally:
        patched.open_device, staging.Staging.finish = opened, finish  # type: ignore[method-assign]
    copier = finished[-1]._devices[gpu.device]
    assert copier is not None
    outbound = copier._outbound.stream
    spans = {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}
    for stream, first, last, _ in traced.copied:
        spans[stream is outbound].append((gpu.seconds(begin, first), gpu.seconds(begin, last)))
    computed = gpu.seconds(begin, ends[-1])
    hidden = {way: _share_before(computed, found) for way, found in spans.items()}
    tail = max([last for found in spans.values() for _, last in found], default=computed) - computed
    text = (
        f"forward and backward {computed * 1e3:.1f} ms; copies to the host {hidden[True]:.0%} within, copies back "
        f"{hidden[False]:.0%}; what is left takes {max(tail, 0) * 1e3:.1f} ms"
    )
    figures = {"computed": computed, "tail": tail, "to_host": spans[True], "to_device": spans[False]}
    shown = bool(spans[True]) and hidden[True] >= 0.9
    return Found(shown, text, figures, _timeline(computed, spans[True], spans[False]))


def _share_before(end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return the part of all copying that was done by ``end``."""
    total = sum(last - first for first, last in spans)
    return sum(max(min(last, end) - first, 0.0) for first, last in spans) / total if total else 1.0


def _timeline(
    computed: float, to_host: Sequence[tuple[float, float]], back: Sequence[tuple[float, float]]
) -> list[str]:
    """Draw which of the three runs when."""
    end, columns = max([computed, *(last for _, last in (*to_host, *back))]), 72

    def drawn(spans: Sequence[tuple[float, float]]) -> str:
        edges = [(column * end / columns, (column + 1) * end / columns) for column in range(columns)]
        return "".join("█" if any(a < right and b > left for a, b in spans) else "·" for left, right in edges)

    return [
        f"computation  {drawn([(0.0, computed)])}",
        f"to the host  {drawn(to_host)}",
        f"back         {drawn(back)}",
        f"             0 {' ' * (columns - 12)}{end * 1e3:7.1f} ms",
    ]


def two_workers(gpu: Gpu) -> Found:
    """Two workers on one device, over the host path."""
    size = {"width": 512, "heads": 8, "blocks": 8, "hidden": 1792} if gpu.scale == 1 else {}
    settings = gpu.settings(steps=6, batch=4, context=256 if gpu.scale == 1 else 8, **size)
    kinds = [("shm", "fp32", "fp32"), ("shm", "bf16", "fp32"), ("tcp", "fp32", "fp32"), ("shm", "fp32", "int8")]
    runs = [
        large.train(large.Run(settings, channel, dtype, (str(gpu.device),) * 2, 60.0 * gpu.patience, wire))
        for channel, dtype, wire in (kinds if gpu.scale == 1 else kinds[-1:])
    ]
    text = "; ".join(_described(one) for one in runs)
    fell = all(one.workers[0]["losses"][-1] < one.workers[0]["losses"][0] + 0.5 for one in runs)
    return Found(fell and all(one.is_same for one in runs), text, {"runs": [one.to_json() for one in runs]})


def _described(one: large.Finished) -> str:
    losses, run = one.workers[0]["losses"], one.run
    return (
        f"{run.channel} {run.dtype} as {run.wire}: {one.step_seconds * 1e3:.0f} ms a step, loss {losses[0]:.2f} → "
        f"{losses[-1]:.2f}, {'equal bits' if one.is_same else 'DIFFERENT BITS'}"
    )


def large_model(gpu: Gpu) -> Found:
    """The model of 432 million parameters in bf16, with one worker on the GPU and one on the CPU."""
    one = large.train(large.Run(gpu.settings(), "shm", "bf16", (str(gpu.device), "cpu"), 280.0 * gpu.patience))
    first = one.workers[0]
    bits = "equal bits" if one.is_same else "DIFFERENT BITS"
    text = (
        f"{first['nbytes'] / 1e9:.2f} GB each way; {one.step_seconds:.2f} s a step, the CPU's worker included; "
        f"gradients have {bits}; {first['device_bytes'] / 1e9:.1f} GB of the device"
    )
    return Found(one.is_same, text, one.to_json())


def overhead(gpu: Gpu) -> Found:
    """The wrapper costs less than 1 % of a step with a world size of 1."""
    settings = gpu.settings(batch=16, context=1024 if gpu.scale == 1 else 8)  # 16,384 tokens
    with gradserver.connect(rank=0, world_size=1) as worker:
        return _overhead(gpu, settings, worker)


def _overhead(gpu: Gpu, settings: Settings, worker: Worker) -> Found:
    steps: dict[str, Callable[[], None]] = {}
    for name in ("bare", "wrapped"):
        model, optimizer = model_of(settings, gpu, torch.bfloat16)
        wrapped = gradserver.DistributedDataParallel(model, worker) if name == "wrapped" else model
        steps[name] = step_of(wrapped, optimizer, settings, gpu)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(20 if gpu.scale == 1 else 3):
        for name, step in steps.items():
            gpu.wait()
            began = time.perf_counter()
            step()
            gpu.wait()
            if repetition >= 2:
                taken[name].append(time.perf_counter() - began)
    bare, wrapped_seconds = (statistics.median(taken[name]) for name in ("bare", "wrapped"))
    more = wrapped_seconds / bare - 1
    tokens = settings.batch * settings.context
    took = f"a step of {tokens:,} tokens takes {bare * 1e3:.1f} ms bare and {wrapped_seconds * 1e3:.1f} ms wrapped"
    text = f"{took}: {more:+.1%}"
    return Found(more < 0.01, text, {"bare": taken["bare"], "wrapped": taken["wrapped"]})


def waits(gpu: Gpu) -> Found:
    """Torch's sync debug mode, set to error, passes."""
    settings = gpu.settings(width=256, heads=4, blocks=4, hidden=512) if gpu.scale == 1 else gpu.settings()
    with over_the_host() as worker:
        bare = step_of(*model_of(settings, gpu, torch.float32), settings, gpu)
        model, optimizer = model_of(settings, gpu, torch.float32)
        wrapped = step_of(gradserver.DistributedDataParallel(model, worker), optimizer, settings, gpu)
        convolutional = Convolutional().to(gpu.device)
        inputs, classes = (tensor.to(gpu.device) for tensor in images(0, 4))
        replica = gradserver.DistributedDataParallel(convolutional, worker)

        def with_buffers() -> None:
            loss_of(replica, inputs, classes).backward()

        plain = Convolutional().to(gpu.device)

        def bare_with_buffers() -> None:
            loss_of(plain, inputs, classes).backward()

        outcomes = {}
        for name, step in (
            ("a bare model with buffers", bare_with_buffers),
            ("the bare model", bare),
            ("the wrapped model", wrapped),
            ("a model with buffers", with_buffers),
        ):
            step()  # what is made once may wait
            gpu.refuse_waits(True)
            try:
                for _ in range(3):
                    step()
                outcomes[name] = ""
            except RuntimeError as error:
                outcomes[name] = str(error).splitlines()[0]
            finally:
                gpu.refuse_waits(False)
    text = "; ".join(f"{name}: {error or 'passes'}" for name, error in outcomes.items())
    return Found(not any(outcomes.values()), text, outcomes)


def memory(gpu: Gpu) -> Found:
    """At most one extra copy of the gradients."""
    settings = gpu.settings(batch=2, context=256 if gpu.scale == 1 else 8)
    peaks, host = {}, 0
    for name in ("bare", "wrapped"):
        with over_the_host() as worker:
            model, optimizer = model_of(settings, gpu, torch.bfloat16)
            wrapped = gradserver.DistributedDataParallel(model, worker) if name == "wrapped" else model
            step = step_of(wrapped, optimizer, settings, gpu)
            gpu.forget_peak()
            for _ in range(3):
                step()
            gpu.wait()
            peaks[name] = gpu.peak()
            if isinstance(wrapped, gradserver.DistributedDataParallel):
                copiers = [one for one in _staged(wrapped)._devices.values() if one is not None]
                host = sum(memory.nbytes for one in copiers for memory in one._memory._locked)
            del model, optimizer, wrapped, step
    nbytes = settings.parameters * 2
    more = peaks["wrapped"] - peaks["bare"]
    text = (
        f"gradients have {nbytes / 1e9:.2f} GB. At its peak the wrapped model takes {more / nbytes:+.2f} times that "
        f"beyond the bare one on the device, and {host / nbytes:.2f} times that on the host"
    )
    return Found(more <= 1.02 * nbytes and host <= 1.05 * nbytes + 64 * MIB, text, {**peaks, "host": host})


def _staged(wrapped: gradserver.DistributedDataParallel) -> staging.Staging:
    """Return the plane of a module that the coordinator reduces."""
    plane = wrapped._rounds._plane
    assert isinstance(plane, staging.Staging)
    return plane


def scaler(gpu: Gpu) -> Found:
    """Training in fp16 with a GradScaler, which overflows on purpose."""
    kind = gpu.device.type
    narrow = torch.float16 if kind == "cuda" else torch.bfloat16
    settings = replace(SMALL, batch=4, context=16)

    def work(worker: Worker) -> tuple[float, list[Tensor]]:
        torch.manual_seed(worker.rank)
        model, optimizer = model_of(settings, gpu, torch.float32)
        replica = gradserver.DistributedDataParallel(model, worker)
        scale: Any = torch.amp.GradScaler(kind, init_scale=2.0**60, backoff_factor=2.0**-12)
        generator = torch.Generator().manual_seed(worker.rank)
        for _ in range(10):
            drawn = torch.randint(settings.vocabulary, (4, 17), generator=generator).to(gpu.device)
            optimizer.zero_grad()
            with torch.autocast(kind, narrow):
                loss = F.cross_entropy(replica(drawn[:, :-1]).flatten(0, -2), drawn[:, 1:].flatten())
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
        return float(scale.get_scale()), [parameter.detach().cpu() for parameter in model.parameters()]

    with gradserver.LocalCluster(2, nonfinite="propagate", timeout=60.0) as cluster:
        (scale, mine), (_, others) = cluster.run(work)
    same = all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))
    finite = all(bool(one.isfinite().all()) for one in mine)
    text = (
        f"the scale fell from 2^60 to 2^{np.log2(scale):.0f} in 10 steps; weights are "
        f"{'finite' if finite else 'NOT finite'}, and {'equal' if same else 'DIFFERENT'} at both workers"
    )
    fell = scale < 2.0**60 or narrow is torch.bfloat16  # which does not overflow: there is no fp16 in a rehearsal
    return Found(same and finite and fell, text, {"scale": scale})


def codecs(gpu: Gpu) -> Found:
    """Codecs have the same bits on the device as on the host."""
    generator, parts, good = np.random.default_rng(0), [], True
    for name, codec in DEVICE_CODECS.items():
        wrong = 0
        for numel in (1, 255, 65_536, 65_537, 3 * 65_536 + 777, gpu.sized(32 * MIB) // 4):
            residual, owed = torch.zeros(numel, device=gpu.device), np.zeros(numel, np.float32)
            for kind in ("usual", "usual", "any bits"):
                bits = generator.integers(0, 2**32, numel, np.uint32).view(np.float32)
                values = generator.standard_normal(numel, np.float32) if kind == "usual" else bits
                payload = torch.empty(codec.codec.nbytes(numel), dtype=torch.uint8, device=gpu.device)
                codec.encode(torch.from_numpy(values).to(gpu.device), payload, residual)
                expected = np.frombuffer(gradserver_encode(name, values, owed), np.uint8)
                wrong += int((payload.cpu().numpy() != expected).sum())
                wrong += int((residual.cpu().numpy().view(np.uint32) != owed.view(np.uint32)).sum())
        parts.append(f"{name}: {wrong} different, {_codec_rate(gpu, name) / 1e9:.0f} GB/s")
        good = good and not wrong
    return Found(good, "; ".join(parts))


def gradserver_encode(name: str, values: Any, residual: Any) -> memoryview:
    """Encode on the host, with feedback."""
    from gradserver.protocol.codecs import codec_of, encode_with_feedback

    return encode_with_feedback(codec_of(name), values, residual)


def _codec_rate(gpu: Gpu, name: str) -> float:
    codec, numel = DEVICE_CODECS[name], gpu.sized(128 * MIB) // 4
    values, residual = torch.randn(numel, device=gpu.device), torch.zeros(numel, device=gpu.device)
    payload = torch.empty(codec.codec.nbytes(numel), dtype=torch.uint8, device=gpu.device)
    return 4 * numel / _best_seconds(gpu, lambda: codec.encode(values, payload, residual), None)


def nccl(gpu: Gpu) -> Found:
    """One rank over NCCL, end to end.

    The policy for gradients that are not finite is one with which a worker that is alone reduces all the same.
    """
    settings = gpu.settings(batch=8, context=1024 if gpu.scale == 1 else 8)
    with (
        coordinator(1, "--nonfinite", "skip") as url,
        gradserver.connect(url, 0, 1, plane="direct") as worker,
        _counting() as reduced,
    ):
        found = _overhead(gpu, settings, worker)
        weights = [_trained(gpu, settings, worker if wraps else None) for wraps in (False, False, True)]
    there = reduced.count(gpu.device.type)
    noise, distance = (_distance(weights[0], others) for others in weights[1:])
    text = (
        f"{there} reductions on the device; after 3 steps the weights are {distance:.1e} from those of the bare model, "
        f"of which two runs are {noise:.1e} apart; {found.text}"
    )
    return Found(there > 0 and distance <= 3 * noise + 1e-6, text, found.figures)


@contextmanager
def _counting() -> Iterator[list[str]]:
    """Yield the kinds of devices on which reductions were begun."""
    begun, begin = list[str](), Communicator.all_reduce

    def noted(self: Communicator, tensor: Tensor, op: Op, signal: Signal) -> Reduction:
        begun.append(tensor.device.type)
        return begin(self, tensor, op, signal)

    Communicator.all_reduce = noted  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        Communicator.all_reduce = begin  # type: ignore[method-assign]


def _trained(gpu: Gpu, settings: Settings, worker: Worker | None) -> list[Tensor]:
    """Return the weights after three steps, wrapped if there is a worker."""
    model, optimizer = model_of(settings, gpu, torch.bfloat16)
    wrapped = model if worker is None else gradserver.DistributedDataParallel(model, worker)
    step = step_of(wrapped, optimizer, settings, gpu)
    for _ in range(3):
        step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the relative distance of two lists of tensors. Kernels of attention add in any order."""
    apart = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(one, other, strict=True))
    return float((apart / sum(float(a.float().square().sum()) for a in one)) ** 0.5)


MEASUREMENTS: dict[str, Callable[[Gpu], Found]] = {
    "copies": copies,
    "nccl": nccl,
    "waits": waits,
    "overlap": overlap,
    "codecs": codecs,
    "two-workers": two_workers,
    "overhead": overhead,
    "memory": memory,
    "scaler": scaler,
    "large-model": large_model,
}


def facts() -> dict[str, str]:
    """Describe the device and the software; empty without a device."""
    if not torch.cuda.is_available():
        return {}
    properties: Any = _Cuda.get_device_properties(0)
    version = _Cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    build: Any = torch.version
    return {
        "device": f"{torch.cuda.get_device_name(0)}, {properties.total_memory / 2**30:.0f} GiB",
        "torch": f"{torch.__version__}, CUDA {build.cuda}",
        "NCCL": ".".join(map(str, version)) or "none",
    }


def main() -> int:
    """Make the measurement that the argument names."""
    tell, name = reserve_stdout(), sys.argv[1]
    if name == "facts":
        tell(json.dumps(facts()))
        return 0
    tell(json.dumps(asdict(MEASUREMENTS[name](Gpu()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
