"""The parameters that a module has, compared with those that it had when it was wrapped.

Gradients of a parameter are exchanged through a hook on it, so another parameter in its place would be trained by each
worker alone. Scripts exchange parameters in many ways, which no call announces:

    change                                                     what the check sees
    ─────────────────────────────────────────────────────────  ──────────────────────────────────────────────
    load_state_dict(assign=True), to("meta"), another module   known names with other parameters
    adapters, weight_norm, a new head                          parameters that were not there
    del model.head                                             parameters that are gone
    requires_grad_() of a frozen parameter                     that it requires a gradient
    half(), double(), to(device)                               another element type or device
    torch.__future__.set_swap_module_params_on_conversion      another tensor inside of the same parameter

A parameter that only has another place or name is the same one, as under ``prune`` and ``spectral_norm``, or behind
``model.module = torch.compile(model.module)``. The check is by identity, in loops of C: some microseconds for ten
parameters. Only a difference leads to a look at names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

from torch import nn

from gradserver.protocol.errors import DTypeError, GradServerError, UsageError

_MOST_NAMED: Final = 8
_SAMPLED: Final = 8
"""One of so many parameters is asked for its type and device, as a conversion is of modules. Backward asks each."""
_UNEXCHANGED: Final = (
    "each worker would train it alone. Change the module first, then wrap it, and make the optimizer of its parameters"
)
_STALE: Final = "its place in each exchange would be empty. Change the module first, then wrap it"

_parameters, _children = attrgetter("_parameters"), attrgetter("_modules")
_dtype, _device = attrgetter("dtype"), attrgetter("device")
_tensor, _requires_grad = attrgetter("_cdata"), attrgetter("requires_grad")


class Composition:
    """The parameters of a module, as they are now: this is to be made when it is wrapped.

    Args:
        module: the module.
        exchanged: the parameters that are exchanged, with their names.
        ignored: names of parameters that stay local.
        kinds: whether these must keep element type, device and hooks, as their gradients travel.
    """

    def __init__(
        self,
        module: nn.Module,
        exchanged: Sequence[tuple[str, nn.Parameter]],
        ignored: Collection[str] = (),
        kinds: bool = True,
    ) -> None:
        self._exchanged = list(exchanged)
        self._parameters = [parameter for _, parameter in exchanged] if kinds else []
        self._sampled = self._exchanged[::_SAMPLED] if kinds else []
        self._some = [parameter for _, parameter in self._sampled]
        self._dtypes, self._devices = [*map(_dtype, self._some)], [*map(_device, self._some)]
        self._tensors = [*map(_tensor, self._parameters)]
        named = dict(module.named_parameters())
        self._ignored = frozenset(ignored)
        self._local = {id(named[name]): named[name] for name in named.keys() & self._ignored}
        self._note(module)

    def _note(self, module: nn.Module) -> None:
        """Take the present structure of ``module`` for that to compare with."""
        parts = list(module.modules())
        self._root, self._tables = module, [*map(_parameters, parts), *map(_children, parts)]
        self._values: Any = dict.values if all(type(one) is dict for one in self._tables) else methodcaller("values")
        self._kept = [*self._members()]
        known = {id(parameter) for _, parameter in self._exchanged} | self._local.keys()
        named = [(n, p) for n, p in module.named_parameters() if id(p) not in known and n not in self._ignored]
        self._frozen = [(name, parameter) for name, parameter in named if parameter.numel()]
        self._others = [parameter for _, parameter in self._frozen]

    def _members(self) -> chain[object]:
        """Return parameters and children of all parts of the module, as they are registered now."""
        return chain.from_iterable(map(self._values, self._tables))

    def _is_same(self) -> bool:
        return sum(map(len, self._tables)) == len(self._kept) and all(map(is_, self._members(), self._kept))

    def check(self, module: nn.Module | None = None) -> None:
        """Compare the module, or the one that is in its place now.

        Raises:
            UsageError: it has not the parameters that it was wrapped with. The error names them.
            DTypeError: these have another element type or device.
        """
        self.check_members(module)
        if self._dtypes != [*map(_dtype, self._some)] or self._devices != [*map(_device, self._some)]:
            raise self._converted()
        if self._tensors != [*map(_tensor, self._parameters)]:
            raise self._swapped()

    def check_members(self, module: nn.Module | None = None) -> None:
        """Compare which parameters there are, and whether they are frozen. Raises UsageError as `check` does."""
        root = self._root if module is None else module
        if root is not self._root or not self._is_same():
            self._compare(root)
            self._note(root)
        if any(map(_requires_grad, self._others)):
            thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
            what = "was frozen when the module was wrapped and requires a gradient now"
            raise _refused(thawed, what, "each worker would train it alone. Wrap the module again after unfreezing it")

    def _compare(self, module: nn.Module) -> None:
        """Raise UsageError if ``module`` has not the parameters that are exchanged, or has further ones to train."""
        now = dict(module.named_parameters())
        there = {id(parameter) for parameter in now.values()}
        known = (
            {id(parameter) for _, parameter in self._exchanged} | {id(one) for one in self._others} | self._local.keys()
        )
        gone = [name for name, parameter in self._exchanged if id(parameter) not in there]
        if replaced := [name for name in gone if name in now]:
            ways = "was replaced after the module was wrapped, as by load_state_dict(assign=True) or to('meta')"
            raise _refused(replaced, ways, f"{_UNEXCHANGED}. For torch.func.functional_call give it model.module")
        new = [n for n, p in now.items() if id(p) not in known and n not in self._ignored and p.numel()]
        if added := [name for name in new if now[name].requires_grad]:
            ways = "came into the module after it was wrapped, as an adapter, weight_norm or a new head does"
            raise _refused(added, ways, _UNEXCHANGED)
        if gone:
            raise _refused(gone, "left the module after it was wrapped", _STALE)

    def _converted(self) -> GradServerError:
        before = zip(self._sampled, self._dtypes, self._devices, strict=True)
        name, now, dtype, device = next(
            (name, p, dtype, device) for (name, p), dtype, device in before if (p.dtype, p.device) != (dtype, device)
        )
        return DTypeError(
            f"parameter {name!r} is {now.dtype} on {now.device}, but the module was wrapped with {dtype} on {device}: "
            f"move or convert a module before wrapping it"
        )

    def _swapped(self) -> GradServerError:
        there = zip(self._exchanged, self._tensors, strict=True)
        swapped = [name for (name, parameter), tensor in there if _tensor(parameter) != tensor]
        ways = "got another tensor after the module was wrapped, as with set_swap_module_params_on_conversion(True)"
        return _refused(swapped, ways, _UNEXCHANGED)


def _refused(names: Sequence[str], what: str, why: str) -> UsageError:
    first, *others = names
    more = ", ".join(map(repr, others[:_MOST_NAMED]))
    if len(others) > _MOST_NAMED:
        more += f" and {len(others) - _MOST_NAMED} more"
    so = f" (so {'was' if len(others) == 1 else 'were'} {more})" if others else ""
    return UsageError(f"parameter {first!r} {what}{so}: {why}")
