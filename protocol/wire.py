"""Messages to and from frames.

    frame 0   "GS", one byte of protocol version, then a msgpack array: [type, field, field, …]
    frame 1…  payloads, raw: slices of tensors, an encoded plan, a status in JSON

Headers are msgpack, tensors never are. Decoding takes any bytes and gives a message or a
`ProtocolError`; it checks every value against `gradserver.protocol.limits` before anything is built from it.

The header of a `Failure` keeps its form in every version, so that a peer of another version can be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgpack

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import brief, facts, flag, integer, listed, number, numbers, optional, text
from gradserver.protocol.codecs import codec_from
from gradserver.protocol.dtypes import BY_CODE
from gradserver.protocol.errors import (
    LimitExceededError,
    MalformedMessageError,
    ProtocolError,
    VersionMismatchError,
)
from gradserver.protocol.exchange import EXACT, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import (
    MAX_CLAIMED,
    MAX_COUNTER,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_LIST,
    MAX_NAME_BYTES,
    MAX_NUMEL,
    MAX_ORDER_BYTES,
    MAX_RATE,
    MAX_REPORT_BYTES,
    MAX_SEED,
    MAX_SHARDS,
    MAX_SLICES,
    MAX_TEXT,
    MAX_TIMEOUT,
    MAX_TOKEN,
    MAX_WEIGHT,
    MAX_WORLD_SIZE,
    PROTOCOL_VERSION,
    SLICE_BYTES,
)
from gradserver.protocol.messages import (
    Agreed,
    Attend,
    Attended,
    BePresent,
    Enlist,
    Enlisted,
    Enter,
    Entered,
    Failure,
    Follow,
    Inquire,
    Join,
    Leave,
    Membership,
    MemoryAt,
    Message,
    Missing,
    Opened,
    Opens,
    Ordered,
    Ping,
    Place,
    Present,
    Propose,
    Push,
    Ready,
    Reported,
    Result,
    RoundDone,
    Scope,
    Serve,
    ShareMemory,
    StateFailed,
    Status,
    StatusRequest,
    Steps,
    Taken,
    Transfer,
    Welcome,
)
from gradserver.protocol.positions import Claim, Claimed, Located, Register, Used
from gradserver.protocol.ranges import MAX_RANGES_BYTES
from gradserver.protocol.resuming import MAX_SPANS_BYTES, Fetch, Held, Holding, Resume, Resumed, Standing

_MAGIC: Final = b"GS"
_PREFIX: Final = _MAGIC + bytes([PROTOCOL_VERSION])
_packb = msgpack.Packer(autoreset=True, unicode_errors="replace").pack

# ── checks of fields ──────────────────────────────────────────────────────────────────────────────────

_MAX_TOTAL: Final = 2 * MAX_WORLD_SIZE * MAX_WEIGHT  # sums round
_LAST_STREAM: Final = int(max(Stream))
_text = text(MAX_TEXT)
_texts = listed(_text, MAX_LIST)
_seat = integer(0, MAX_WORLD_SIZE - 1)
_seats = listed(_seat, MAX_WORLD_SIZE)
_rank = integer(-1, MAX_WORLD_SIZE - 1)
_counter = integer(0, MAX_COUNTER)
_claimed = integer(0, MAX_CLAIMED)
_stream = integer(0, _LAST_STREAM)
_slices = integer(1, MAX_SLICES)
_numel = integer(0, MAX_NUMEL)
_known_scope = integer(0, max(Scope))
_rate = number(0.0, MAX_RATE)
_rates = listed(_rate, MAX_SHARDS)
_total = number(0.0, _MAX_TOTAL)
_weight = number(0.0, MAX_WEIGHT)
_weights = numbers(-MAX_WEIGHT, MAX_WEIGHT, MAX_WORLD_SIZE)
_data = text(MAX_NAME_BYTES)
_seed = integer(0, MAX_SEED)


def _key(value: Any) -> ExchangeKey:
    if type(value) is not list or not 3 <= len(value) <= 5:
        raise MalformedMessageError(f"expected an exchange's key, got {brief(value)}")
    stream, number, part, *peers = value
    return ExchangeKey(_stream(stream), _counter(number), _counter(part), *map(_rank, peers))


def _operation(value: Any) -> Operation | None:
    if value is None:
        return None
    if type(value) is not list or len(value) not in (5, 7):
        raise MalformedMessageError(f"expected an operation, got {brief(value)}")
    try:
        return _known_operation(*value)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedMessageError(f"no operation: {brief(value)}") from error


@lru_cache(maxsize=1024)
def _known_operation(kind: Any, op: Any, dtype: Any, numel: Any, root: Any, *codec: Any) -> Operation:
    """The operation of these numbers; the same object for the same ones, which makes comparing them quick."""
    known = codec_from(_counter(codec[0]), _counter(codec[1])) if codec else EXACT
    return Operation(Kind(kind), Op(op), BY_CODE[dtype], _numel(numel), _rank(root), known)


def _scope(value: Any) -> Scope:
    return Scope(_known_scope(value))


def _place(value: Any) -> Place | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 2:
        raise MalformedMessageError(f"expected a place in shared memory, got {brief(value)}")
    return Place(_counter(value[0]), _counter(value[1]))


def _transfer(value: Any) -> Transfer:
    if type(value) is not list or len(value) != 4:
        raise MalformedMessageError(f"expected a transfer of state, got {brief(value)}")
    return Transfer(_counter(value[0]), _seat(value[1]), _seat(value[2]), flag(value[3]))


# ── the table: code, class, the checks for its fields in order, payloads allowed, bytes in one ────────

_TYPES: Final[tuple[tuple[type[Any], tuple[Callable[[Any], Any], ...], int, int, int], ...]] = (
    # class, fields, fewest and most payloads, most bytes in a payload
    (Failure, (_scope, _text, _text, facts, optional(_key)), 0, 0, 0),
    (Join, (_text, _text, _rank, integer(0, MAX_WORLD_SIZE), number(0.0, MAX_TIMEOUT)), 0, 0, 0),
    (
        Welcome,
        (
            *(_text, _rank, *(_counter,) * 2, *(_texts,) * 2, _rates, _text, _seats, flag),
            *(*(_counter,) * 2, flag, _text),
            *(number(0.0, MAX_TIMEOUT), _text),
        ),
        *(0, 0, 0),
    ),
    (Propose, (_text, _claimed, _text, listed(_counter, MAX_LIST)), 1, 1, MAX_FRAME_BYTES),
    (Agreed, (_text, _counter, _counter), 0, 1, MAX_FRAME_BYTES),
    (Push, (_key, _counter, _weight, flag, _operation, _slices, _place, _counter, _place), 0, 1, SLICE_BYTES),
    (Result, (_key, _counter, _total, flag, _slices, flag, flag, _seats, _weights, _seats), 0, 1, SLICE_BYTES),
    (Inquire, (_key,), 0, 0, 0),
    (Missing, (_key, _texts), 0, 0, 0),
    (Leave, (_text, flag), 0, 0, 0),
    (Ping, (), 0, 0, 0),
    (StatusRequest, (), 0, 0, 0),
    (Status, (), 1, 1, MAX_FRAME_BYTES),
    (ShareMemory, (), 0, 0, 0),
    (MemoryAt, (_text, _text), 0, 0, 0),
    (Enlist, (_text, optional(_rate), text(MAX_TOKEN)), 0, 0, 0),
    (Enlisted, (integer(1, MAX_COUNTER), flag), 0, 0, 0),
    (Ordered, (), 1, 1, MAX_ORDER_BYTES),
    (Reported, (), 1, 1, MAX_REPORT_BYTES),
    (Attend, (_text, _counter, _rank, _text), 0, 0, 0),
    (Attended, (), 0, 0, 0),
    (Membership, (_counter, _seats, _texts, _text, flag, _seats, _counter), 0, 0, 0),
    (RoundDone, (_counter, _counter, listed(_transfer, MAX_LIST)), 0, 0, 0),
    (Resume, (_text, _seat, _text, _claimed, _text, flag), 0, 0, 0),
    (Resumed, (_counter, _counter, listed(_text, MAX_SHARDS)), 0, 0, 0),
    (Holding, (_counter, _claimed, _weight, integer(-1, MAX_COUNTER)), 1, 1, MAX_SPANS_BYTES),
    (Fetch, (_counter, _key, _counter), 0, 0, 0),
    (Held, (_counter, _key, _counter, _total, flag, _seats, _weights), 0, 1, SLICE_BYTES),
    (Standing, (_counter, _counter), 0, 0, 0),
    (Taken, (_counter,), 0, 0, 0),
    (Register, (_data, _numel, _seed, flag, _claimed, _claimed), 1, 1, MAX_RANGES_BYTES),
    (Located, (_data, _seed), 1, 1, MAX_RANGES_BYTES),
    (Claim, (_data, _counter, _claimed, _numel, _claimed), 0, 0, 0),
    (Claimed, (_data, _counter, _seed, flag), 1, 1, MAX_RANGES_BYTES),
    (Used, (_data, _claimed, _claimed), 1, 1, MAX_RANGES_BYTES),
    (Serve, (), 0, 0, 0),
    (Enter, (_counter, flag), 0, 0, 0),
    (Ready, (_counter,), 0, 0, 0),
    (Entered, (_counter,), 0, 0, 0),
    (StateFailed, (_counter, _text), 0, 0, 0),
    (BePresent, (text(MAX_TOKEN), number(0.0, MAX_TIMEOUT)), 0, 0, 0),
    (Present, (text(MAX_TOKEN),), 0, 0, 0),
    (Opens, (_claimed, _counter), 0, 0, 0),
    (Steps, (_claimed, _counter, _counter, _counter), 0, 0, 0),
    (Follow, (_claimed, _counter), 0, 0, 0),
    (Opened, (_counter, _counter, flag, _counter, _counter, flag, _counter), 0, 0, 0),
)
_SHORTER: Final = {Push: (5, 7, 8), Result: (4, 5, 6, 7, 8, 9)}
"""With so many fields they come too: what is behind concerns shared memory, and groups that are elastic or durable."""
_CODE_OF: Final = {row[0]: code for code, row in enumerate(_TYPES)}
_PUSH_CODE: Final = bytes([_CODE_OF[Push]])


UNCHECKED: Final = {Push, Result, RoundDone, Taken, Ping}
"""Of these there are many in a round, and what is in them was checked where it came from. Tests check them, too."""


@lru_cache(maxsize=1024)
def _pack_operation(operation: Operation | None) -> list[int] | None:
    if operation is None:
        return None
    numbers = [operation.kind, operation.op, operation.dtype.code, operation.numel, operation.root]
    return [*numbers, operation.codec.code, operation.codec.parameter] if operation.is_lossy else numbers


def encode(message: Message) -> bytes:
    """The header frame of ``message``. Payloads are frames of their own and travel behind it as they are.

    Raises:
        LimitExceededError: it is longer than a header may be.
        MalformedMessageError: `decode` would not take a field of it. Those that are `UNCHECKED` are not looked at.
    """
    values: tuple[Any, ...]
    if isinstance(message, Push):
        values = (message.key, message.slice, message.weight, message.present, _pack_operation(message.operation))
        if message.target is not None:
            values = (*values, message.slices, message.place, message.epoch, message.target)
        elif message.epoch:
            values = (*values, message.slices, message.place, message.epoch)
        elif message.place is not None or message.slices != 1:
            values = (*values, message.slices, message.place)
    elif isinstance(message, Result):
        shared = message.placed or message.slices != 1
        if message.nonfinite:
            values = message
        elif message.weights:
            values = message[:9]
        elif message.without:
            values = message[:8]
        elif message.over:
            values = message[:7] if shared else (*message[:4], True)
        else:
            values = message[: 6 if shared else 4]
    else:
        values = tuple(getattr(message, name) for name in message.__slots__)
    try:
        header: bytes = _PREFIX + _packb((_CODE_OF[type(message)], *values))
    except (OverflowError, TypeError, ValueError) as error:
        if isinstance(message, Failure) and message.fields:
            return encode(replace(message, fields={}))
        raise MalformedMessageError(f"a {type(message).__name__} that cannot be encoded: {error}") from error
    if len(header) <= MAX_HEADER_BYTES:
        if type(message) not in UNCHECKED:
            _read(header)
        return header
    if isinstance(message, Failure) and (message.fields or len(message.text) > MAX_TEXT):
        return encode(replace(message, text=message.text[:MAX_TEXT], fields={}))  # its text says it all
    name = type(message).__name__
    raise LimitExceededError(f"a {name} header of {len(header)} bytes, the limit is {MAX_HEADER_BYTES}")


def decode(frames: Sequence[Buffer]) -> tuple[Message, Sequence[Buffer]]:
    """The message in ``frames`` and its payloads, which are the very buffers that came in.

    Raises:
        VersionMismatchError: the header is of another protocol version.
        LimitExceededError: a frame is larger than the limits allow.
        MalformedMessageError: anything else that is not a message.
    """
    if not frames:
        raise MalformedMessageError("a message without frames")
    header = frames[0]
    if len(header) > MAX_HEADER_BYTES:
        raise LimitExceededError(f"a header of {len(header)} bytes, the limit is {MAX_HEADER_BYTES}")
    common = len(header) <= _COMMON_BYTES and header[4:5] == _PUSH_CODE
    message, (fewest, most, largest) = _common(bytes(header)) if common else _read(header)
    payloads = frames[1:]
    if not fewest <= len(payloads) <= most:
        kind = type(message).__name__
        raise MalformedMessageError(f"{kind} with {len(payloads)} payloads; {fewest} to {most} go with it")
    for payload in payloads:
        if len(payload) > largest:
            kind = type(message).__name__
            raise LimitExceededError(f"{kind} with a payload of {len(payload)} bytes, the limit is {largest}")
    if type(message) is Push or type(message) is Result:
        _check_payload(message, len(payloads))
    elif type(message) is Held and len(payloads) != message.present:
        raise MalformedMessageError("a Held that announces a payload without one, or has one without announcing it")
    return message, payloads


def _read(header: Buffer) -> tuple[Message, tuple[int, int, int]]:
    """The message in a header, and how many payloads go with it: the fewest, the most, and the bytes in one."""
    code, values = _unpack(header)
    kind, checks, *payloads = _TYPES[code]
    if len(values) != len(checks) and len(values) not in _SHORTER.get(kind, ()):
        raise MalformedMessageError(f"{kind.__name__} has {len(checks)} fields, got {len(values)}")
    quick = _quick_push if kind is Push else _quick_result if kind is Result else None
    message: Message | None = quick(values) if quick is not None else None
    if message is None:
        if kind is Result and len(values) == 5:  # the shortest one that says that the round is over
            values = [*values[:4], 1, False, values[4]]
        message = kind(*[check(value) for check, value in zip(checks, values, strict=False)])
    fewest, most, largest = payloads
    return message, (fewest, most, largest)


_COMMON_BYTES: Final = 64
_common = lru_cache(maxsize=256)(_read)
"""Members say the same of the same slice, most often: the coordinator reads it once."""


def _check_payload(message: Push | Result, payloads: int) -> None:
    """Data travels as payload or lies in shared memory, one of the two."""
    shared = message.placed if isinstance(message, Result) else message.place is not None
    if payloads != (message.present and not shared):
        raise MalformedMessageError(
            f"a {type(message).__name__} that announces a payload without one, or has one without announcing it"
        )
    if message.slices > 1 and message.present and not shared:
        raise MalformedMessageError(
            f"a {type(message).__name__} of {message.slices} slices with a payload: one at most"
        )
    if isinstance(message, Push) and message.target is not None and message.place is None:
        raise MalformedMessageError("a Push that names a place for its result, and none for what it gives")


# The two messages of the data path, checked as the table says, in one expression each: a small tensor is
# mostly overhead. None means that something is unusual; the table then finds out what.


def _quick_push(values: list[Any]) -> Push | None:
    if len(values) != 5:
        return None
    key, index, weight, present, operation = values
    exchange = _quick_key(key)
    if exchange is None or not (
        type(index) is int and 0 <= index <= MAX_COUNTER and type(weight) is float and 0.0 <= weight <= MAX_WEIGHT
    ):
        return None
    if type(present) is not bool:
        return None
    return Push(exchange, index, weight, present, None if operation is None else _operation(operation))


def _quick_result(values: list[Any]) -> Result | None:
    count = len(values)
    if count != 4 and (count != 5 or values[4] is not True) and (count != 9 or values[4:8] != [1, False, False, []]):
        return None
    key, index, weight, present = values[:4]
    exchange = _quick_key(key)
    if exchange is None or not (
        type(index) is int and 0 <= index <= MAX_COUNTER and type(weight) is float and 0.0 <= weight <= _MAX_TOTAL
    ):
        return None
    if type(present) is not bool or (count == 9 and (type(values[4]) is not int or values[5] is not False)):
        return None
    return Result(exchange, index, weight, present, 1, False, count == 5, (), _weights(values[8]) if count == 9 else ())


def _quick_key(value: Any) -> ExchangeKey | None:
    if type(value) is not list or len(value) != 5:
        return None
    stream, number, part, source, target = value
    if (
        type(stream) is type(number) is type(part) is type(source) is type(target) is int
        and 0 <= stream <= _LAST_STREAM
        and 0 <= number <= MAX_COUNTER
        and 0 <= part <= MAX_COUNTER
        and -1 <= source < MAX_WORLD_SIZE
        and -1 <= target < MAX_WORLD_SIZE
    ):
        return ExchangeKey(stream, number, part, source, target)
    return None


def _unpack(header: Buffer) -> tuple[int, list[Any]]:
    prefix = bytes(header[:3])
    if prefix[:2] != _MAGIC or len(prefix) < 3:
        raise MalformedMessageError(f"not a gradserver message: it begins with {bytes(header[:8])!r}")
    body = header[3:]
    try:
        unpacked = msgpack.unpackb(
            body,
            use_list=True,
            raw=False,
            strict_map_key=True,
            max_str_len=4 * MAX_TEXT,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_LIST,
            max_map_len=64,
        )
    except Exception as error:  # msgpack raises a zoo of types, all of them about these bytes
        if prefix[2] != PROTOCOL_VERSION:
            raise _other_version(prefix[2]) from None
        raise MalformedMessageError(f"a header that is not msgpack: {str(error)[:120]}") from None
    if type(unpacked) is not list or not unpacked or type(unpacked[0]) is not int:
        raise MalformedMessageError("a header that is not an array which begins with a message type")
    code = unpacked[0]
    is_failure = code == _CODE_OF[Failure]
    if prefix[2] != PROTOCOL_VERSION and not is_failure:
        raise _other_version(prefix[2])
    if not 0 <= code < len(_TYPES):
        raise MalformedMessageError(f"unknown message type {code}")
    return code, unpacked[1:]


def _other_version(theirs: int) -> ProtocolError:
    return VersionMismatchError(
        f"the peer speaks protocol version {theirs}, this side version {PROTOCOL_VERSION}: "
        f"install the same gradserver on both"
    )
