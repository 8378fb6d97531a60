"""WeightUpdate: takes new weights of a model, from any source, on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from itertools import count

from torch import Tensor

from megatron_hybrid.checkpoints.checkpoint import checked_load
from megatron_hybrid.checkpoints.folder import CheckpointFolder
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, check_numbers
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.weights.fingerprint import sample_hash
from megatron_hybrid.inference.weights.loading import WeightLoader, require_values
from megatron_hybrid.inference.weights.transfer import Part
from megatron_hybrid.models.hybrid_model import HybridModel

Pairs = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_END = "nothing more"
_CHECKING, _WRITING = "checking new weights", "writing new weights"
HOW = (
    "by load_weights(), or by start_weight_update() and so on, where receive_weights({'path': ...})"
    " reads a folder"
)
REMEDY = f"send these once more, or the whole model, {HOW}"
WRITTEN = f" Tensors of the model were written before: {REMEDY}."


class WeightsUnfinishedError(RuntimeError):
    """The weights are not those of one model, so that no step may use them; the message says how
    to go on."""


class WeightUpdate:
    """One update: it is planned, then it is written, then it is whole or has failed.

    `take` takes each part. All ranks make the same calls. Of a part whose names are known, all
    ranks agree on names, dtypes, shapes and order, and check them, before the first byte is
    written; tensors of another part are agreed on and checked one by one. In both cases, each
    tensor is then compared with what was announced, and its values with those of the other ranks,
    before any rank writes it. As soon as `begun` is not empty, only a whole update may follow.
    """

    def __init__(self, model: HybridModel, ranks: Ranks):
        self._model, self._ranks = model, ranks
        self._loader = WeightLoader(model, ranks)

    @property
    def begun(self) -> set[str]:
        """Names of the tensors of which any rank may have written something."""
        return self._loader.begun

    def take(self, part: Part) -> None:
        """Take a part. After an error the rest of it is received and dropped, as making or sending
        it may need collectives that other processes are in.

        Raises:
            CheckpointError, TypeError: it does not fit, or differs from what was announced or from
                that of another rank. If known names were wrong, nothing was written.
            Exception: the iterator raised it.
        """
        with ExitStack() as stack:
            write = partial(self._write, part)
            packed = part.packed_folder
            try:
                with self._ranks.raise_on_all(_CHECKING):
                    if part.heads is not None and self._ranks.size > 1:
                        # A packed part is written at once, so its values are compared, too.
                        self._agree(part.kind, part.tensors if packed else part.heads)
                    if packed is not None:
                        names = self._loader.of_all
                        folder = CheckpointFolder(packed)
                        checked = checked_load(
                            self._model, folder, names, cast=True, keeps_packing=True
                        )
                        write = partial(self._write_packed, stack.enter_context(checked))
                    elif part.heads is not None:
                        self._plan(part)
            except Exception:
                part.drop()
                raise
            write()

    def check_complete(self) -> None:
        """Raise CheckpointError if the parts lack a tensor that belongs to one that they had."""
        self._loader.checks.require_complete()

    def _agree(self, kind: str, pairs: Iterable) -> None:
        lines = [kind, *(_described(name, tensor) for name, tensor in map(_pair, pairs))]
        digest = blake2b("\n".join(lines).encode()).digest()
        if len(set(self._ranks.gather(digest))) > 1:
            self._raise_difference(self._ranks.gather([*lines, _END]))

    def _plan(self, part: Part) -> None:
        for name, tensor in map(_pair, part.heads):
            self._loader.checks.take(name, tensor)
            if isinstance(tensor, Tensor):
                check_numbers(name, tensor, part.kind, self._loader.dtype(name))
        self._loader.checks.require_known()
        if part.is_whole_call:
            self._loader.checks.require_complete()

    def _raise_difference(self, said: Sequence[Sequence[str]]) -> None:
        """Raise CheckpointError about the first line in which a rank differs from the first rank.
        said: lines of all ranks."""
        members = self._ranks.members
        first = next(lines for lines in zip(*said) if len(set(lines)) > 1)
        other = next(rank for rank, line in enumerate(first) if line != first[0])
        text = (
            f"the ranks have different weights: {members[0]} has {first[0]}, {members[other]} has "
            f"{first[other]}. Give all ranks the same names, dtypes, shapes and values in the same "
            "order."
        )
        raise self._explained(CheckpointError(text))

    def _write_packed(self, write: Callable[[], None]) -> None:
        self._loader.begun |= self._loader.of_all.keys()
        with self._ranks.raise_on_all(_WRITING):
            write()

    def _write(self, part: Part) -> None:
        """Write tensors, each when all ranks have it and agree. A rank that fails reports it when
        the others have the next one: until then they may be in a collective that makes it."""
        pairs, failure, has_ended = part.tensors, None, False
        for index in count():
            pair, line = None, _END
            try:
                pair = next(pairs, None)
                has_ended = pair is None
                if failure is None and has_ended and part.is_whole_call:
                    self._loader.checks.require_complete()
            except BaseException as error:  # reported to the others before this rank raises it
                failure, has_ended = failure or error, True
            if failure is None and not has_ended:
                try:
                    line = self._checked(pair, part, index)
                except Exception as error:
                    failure = error
            own = line, failure is not None, has_ended
            said = [own] if part.is_in_memory else self._ranks.gather(own)
            lines = {line for line, *_ in said}
            if has_ended or len(lines) > 1 or any(failed for _, failed, _ in said):
                break
            try:
                self._loader.writes.take(*pair)
            except Exception as error:
                failure = error
        if not any(ended for *_, ended in said):
            part.drop()
        with self._ranks.raise_on_all(_WRITING):
            if failure is not None:
                raise self._explained(failure)
            if len(lines) > 1 and not any(failed for _, failed, _ in said):
                self._raise_difference([[line] for line, *_ in said])

    def _checked(self, pair: object, part: Part, index: int) -> str:
        """Check a tensor that has come, and return the line that the ranks compare."""
        name, tensor = _pair(pair)
        if isinstance(tensor, CheckpointError):
            raise tensor
        require_values(name, tensor)
        if part.heads is None:
            is_tensor = isinstance(tensor, Tensor) and not hasattr(tensor, "full_tensor")
            self._loader.checks.take(name, tensor.to("meta") if is_tensor else tensor)
        elif (announced := part.heads[index][1]) is tensor:
            return name  # its values were compared and checked
        elif isinstance(tensor, Tensor) and (
            (announced.dtype, announced.shape) != (tensor.dtype, tensor.shape)
        ):
            raise CheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, and was announced as "
                f"{announced.dtype} {list(announced.shape)}."
            )
        if isinstance(tensor, Tensor):
            check_numbers(name, tensor, part.kind, self._loader.dtype(name))
        return _described(name, tensor) if self._ranks.size > 1 else name

    def _explained(self, error: BaseException) -> BaseException:
        """Return an error that also says that tensors were written before, if they were."""
        if not self.begun or not isinstance(error, CheckpointError):
            return error
        explained = CheckpointError(f"{error}{WRITTEN}")
        explained.__cause__ = error
        return explained


def _described(name: str, tensor: object) -> str:
    if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
        return f"{name}, a {type(tensor).__name__}"
    values = "" if tensor.is_meta else f" with the hash {sample_hash(tensor):016x}"
    return f"{name}, {tensor.dtype} {list(tensor.shape)}{values}"


def _pair(given: object) -> tuple[str, object]:
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], str):
        return given[0], given[1]
    kind = type(given).__name__
    raise TypeError(f"load_weights takes pairs of a name and a tensor, got a {kind}")


def what_is_given(pairs: Pairs, is_led: bool, ranks: Ranks) -> Part:
    """Make a part of the pairs that all ranks give, or the first one."""
    receives = is_led and not ranks.is_first
    pairs = () if receives else _listed(pairs)
    heads = None
    if all(ranks.gather(isinstance(pairs, Sequence))):
        heads = ranks.broadcast([_sent(p, "meta") for p in pairs]) if is_led else pairs
    return Part(
        "what load_weights was given",
        heads,
        _of_first_rank(pairs, ranks) if is_led else iter(pairs),
        is_awaited=heads is None,
        is_whole_call=True,
        is_in_memory=heads is not None and not is_led,
    )


def _listed(pairs: Pairs) -> Iterable:
    """Return a list of pairs that are in memory, or an iterator over others."""
    if isinstance(pairs, Mapping):
        pairs = list(pairs.items())
    if isinstance(pairs, Sequence):
        for pair in pairs:
            require_values(*_pair(pair))
        return list(pairs)
    if isinstance(pairs, Iterable):
        return iter(pairs)
    raise TypeError(
        "load_weights takes a mapping of names to tensors, or an iterable of pairs of them, got "
        f"{type(pairs).__name__}"
    )


def _of_first_rank(pairs: Iterable, ranks: Ranks) -> Iterator:
    """Yield the pairs of the first rank, on all ranks."""
    if not ranks.is_first:
        while (pair := ranks.broadcast(None)) is not None:
            if isinstance(pair, str):
                raise CheckpointError(pair)
            yield pair
        return
    pairs = iter(pairs)
    while True:
        try:
            pair = next(pairs, _END)
            sent = None if pair is _END else _sent(pair, "cpu")
        except BaseException as error:
            text = f"the pairs of {ranks.members[0]} end with {type(error).__name__}: {error}"
            ranks.broadcast(text)
            raise
        ranks.broadcast(sent)
        if sent is None:
            return
        yield pair


def _sent(pair: object, device: str) -> object:
    """Copy a pair to be sent to other ranks; of a view only its own elements."""
    name, tensor = _pair(pair)
    require_values(name, tensor)
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().to(device, copy=True).contiguous()
    return name, tensor
