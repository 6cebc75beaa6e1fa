"""Lanes: the thread of each further device, in which its replicas run as they would in the caller's thread."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from gradserver.protocol.errors import DeadlineError

T = TypeVar("T")

_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Lane:
    """Thread that carries out one call after the other. It ends with `close`, or with the lane itself.

    Attributes:
        device: device of the calls, for the thread's name and for errors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._latest: Future[Any] | None = None
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._calls: _Calls = SimpleQueue()
        # It knows the queue alone, and so keeps nothing of the lane alive. A daemon, as a forward may never return.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name=f"gradserver-replica-{self.device}", daemon=True
        )
        self._thread.start()
        self._ending = weakref.finalize(self, self._calls.put, None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread call ``work``."""
        if self._process != os.getpid():  # a forked child has none of its parent's threads
            self._ending.detach()
            self._start()
        future: Future[T] = Future()
        self._latest = future
        self._calls.put((future, work))
        return future

    def settle(self, timeout: float) -> None:
        """Wait until no call is under way. Raises DeadlineError, which says where the thread is."""
        latest, self._latest = self._latest, None
        if latest is None or self._process != os.getpid():
            return
        try:
            latest.exception(timeout)
        except TimeoutError:
            self._latest = latest
            raise DeadlineError(
                f"the replica on {self.device} has not returned from its forward within {timeout:g} s: it is "
                f"{self._where()}. A longer forward needs DataParallel(…, timeout=)"
            ) from None

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)
        return f"at {stack[-1].filename}:{stack[-1].lineno}, in {stack[-1].name}" if frame else "not running"

    def close(self, timeout: float) -> None:
        """End the thread. One that is inside of a forward ends after it, and is not waited for any longer."""
        self._ending()
        if self._process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(timeout)


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        _carry_out(*call)
        del call  # while it waits, the thread keeps no result alive


def _carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised in the caller's thread
        future.set_exception(error)


class Surroundings:
    """Settings of the caller's thread that a forward depends on.

    They are modes of autograd, hooks of saved tensors, the default device, autocast, and context variables.
    """

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [(kind, dtype) for kind in ("cuda", "cpu") if (dtype := _autocast_type(kind)) is not None]
        self._caches = torch.is_autocast_cache_enabled()
        autograd: Any = torch._C._autograd
        top = getattr(autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.3 does not tell them
        self._saving = None if top is None else top(True)
        stack: Any = _get_current_function_mode_stack  # torch has not typed it
        modes = [mode for mode in stack() if isinstance(mode, DeviceContext)]
        self._default: torch.device | None = modes[-1].device if modes else None

    def around(self, device: torch.device, work: Callable[[], T]) -> Callable[[], T]:
        """Return a function that does ``work`` for ``device`` in any thread with these settings."""
        stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        context = copy_context()

        def surrounded() -> T:
            with ExitStack() as stack:
                if self._inference:
                    stack.enter_context(torch.inference_mode())
                stack.enter_context(torch.set_grad_enabled(self._grad))
                for kind, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._caches))
                if self._saving is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
                if self._default is not None:
                    stack.enter_context(device if self._default.type == device.type else self._default)
                if stream is not None:
                    stack.enter_context(torch.cuda.device(device))
                    stack.enter_context(torch.cuda.stream(stream))
                return context.run(work)

        return surrounded


def _autocast_type(kind: str) -> torch.dtype | None:
    """Return the type that autocast uses in this thread, for a kind of device; None where it is off."""
    now: Any = torch  # the functions of torch 2.3 are deprecated since
    if hasattr(torch, "get_autocast_dtype"):
        on, dtype = now.is_autocast_enabled(kind), now.get_autocast_dtype(kind)
    elif kind == "cuda":
        on, dtype = now.is_autocast_enabled(), now.get_autocast_gpu_dtype()
    else:
        on, dtype = now.is_autocast_cpu_enabled(), now.get_autocast_cpu_dtype()
    return dtype if on else None
