"""Works: operations under way, as torch.distributed knows them, and their futures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gradserver.protocol.errors import DeadlineError, GradServerError
from gradserver.torch.errors import as_torchs
from gradserver.worker.collectives.any_source import AnySource
from gradserver.worker.handle import Handle

_IDLE_SECONDS: Final = 10.0
"""Time for which a thread without anything to do stays."""


class Resolvers:
    """Threads that wait for works, and resolve their futures.

    A callback of a future may wait for another future. So no work ever waits for a thread that is busy with another
    one: if all are busy, there is one more.
    """

    def __init__(self) -> None:
        self._calls = deque[Callable[[], None]]()
        self._changed = threading.Condition()
        self._idle = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Have a thread make this call."""
        with self._changed:
            self._calls.append(call)
            if self._idle >= len(self._calls):
                self._changed.notify()
                return
        threading.Thread(target=self._run, name="gradserver-futures", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                there_is = self._changed.wait_for(lambda: self._calls, _IDLE_SECONDS)
                self._idle -= 1
                if not there_is:
                    return
                call = self._calls.popleft()
            call()
            del call


class GradServerWork(dist.Work):
    """One operation under way: the handles of its exchanges, and what is done once they are there.

    Args:
        resolvers: threads for its future.
        handles: the exchanges.
        finish: puts results where they belong, once, in the first thread that finds them there.
        value: tensors with the result.
        seconds: limit of a wait that names none.
        source: rank that a message comes from; -1 for anything else.
        ranks: ranks of the group's members in the default group, for errors.
    """

    def __init__(
        self,
        resolvers: Resolvers,
        handles: Sequence[Handle | AnySource],
        finish: Callable[[], object] | None,
        value: list[torch.Tensor],
        seconds: float,
        source: int = -1,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._resolvers, self._handles, self._finish, self._value = resolvers, handles, finish, value
        self._seconds, self._source, self._ranks = seconds, source, ranks
        self._from_any = [handle for handle in handles if isinstance(handle, AnySource)]
        self._completing, self._making = threading.Lock(), threading.Lock()
        self._over = False
        self._event: AbstractContextManager[object] | None = None
        self._thread = 0
        self._error: GradServerError | None = None
        self._inner: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the result is in the tensors, ``timeout`` or the group's. Raise the error of a failure."""
        given = timeout.total_seconds()
        try:
            self._complete(given if given > 0 else self._seconds)
        finally:
            self._end_event()
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Have what is queued on the current stream from now on come behind the result. This thread waits for it."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""
        if not self._over and all(handle.done() for handle in self._handles):
            try:
                self._complete(self._seconds)
            except GradServerError:
                return True
        return self._over

    def is_success(self) -> bool:
        """Return True if it is done and has not failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> GradServerError | None:
        """Return the error of a failure; None if there is none so far."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Return the rank that a received message is from."""
        return next((one.source for one in self._from_any), self._source)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of tensors.

        An error that Python sets at a future is a value for C++, where torch's DDP would take it for tensors. A
        callback that raises makes a future that has failed for both. So it is that callback's future which is returned.
        """
        self._end_event()
        with self._making:
            if self._future is None:
                devices = {tensor.device for tensor in self._value if tensor.is_cuda}
                self._inner = torch.futures.Future(devices=sorted(devices, key=str))
                self._future = self._inner.then(lambda done: done.wait())
                self._resolvers.submit(self._resolve)
            return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return the same future."""
        return self.get_future()

    def ends(self, event: AbstractContextManager[object]) -> None:
        """End an event of a profiler, which this thread has begun, when this thread has waited.

        A profile is one of threads: another one cannot end it. If this thread does not wait, as with a future, the
        event has the call alone.
        """
        if self._future is not None:
            event.__exit__(None, None, None)
        else:
            self._event, self._thread = event, threading.get_ident()

    def _end_event(self) -> None:
        if self._event is not None and self._thread == threading.get_ident():
            self._event.__exit__(None, None, None)
            self._event = None

    def _resolve(self) -> None:
        inner = self._inner
        assert inner is not None
        try:
            self._complete(self._seconds)
        except Exception as error:
            inner.set_exception(error)
        else:
            inner.set_result(self._value)

    def _complete(self, seconds: float) -> None:
        """Wait for all exchanges, and put their results in place. A wait that ran out may be repeated."""
        if not self._over:
            if not self._completing.acquire(timeout=seconds):
                raise as_torchs(self._overdue(seconds), self._ranks)
            try:
                if not self._over:
                    self._finish_within(seconds)
            finally:
                self._completing.release()
        if self._error is not None:
            raise self._error.again()

    def _overdue(self, seconds: float) -> DeadlineError:
        """Make the error of a wait that ran out while another thread waits, too: it names what is missing."""
        missing = next((handle for handle in self._handles if not handle.done()), None)
        if missing is None:
            return DeadlineError(f"the operation is not done after {seconds:g} s")
        return missing.overdue(seconds)

    def _finish_within(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            # Some tensors may be those of inference mode, which another thread has to be in, too.
            with torch.inference_mode():
                for place, handle in enumerate(self._handles):
                    handle.wait(max(until - time.monotonic(), 0.0) if place else seconds)
                if self._finish is not None:
                    self._finish()
        except DeadlineError as error:
            raise as_torchs(error, self._ranks) from None
        except GradServerError as error:
            self._error = as_torchs(error, self._ranks)
        self._over, self._handles, self._finish = True, (), None
