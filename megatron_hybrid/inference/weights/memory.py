"""WeightMemory: gives the memory of a model's weights back for a while."""

import torch
from torch import Tensor

from megatron_hybrid.models.hybrid_model import HybridModel


class WeightMemory:
    """The memory of the parameters of a model. Buffers, which are small, stay.

    Args:
        model: its parameters share no memory with other tensors when `release` is called.
    """

    def __init__(self, model: HybridModel):
        self._model = model
        self._released: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def is_released(self) -> bool:
        """Whether the memory is given back, by this engine or by another one of the model."""
        return bool(self._released) or not self._model.has_memory

    def release(self, keep: bool) -> None:
        """Give the memory back until `reacquire`. keep: whether the values wait in host memory.

        Raises:
            ValueError: other tensors have a part in it, such as buffers of a training loop; nothing
                has changed.
            MemoryError: the host has no room; nothing has changed.
        """
        if self.is_released:
            return
        found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.untyped_storage().resizable():  # numpy views it, as after saving
                parameter.data = parameter.data.clone()
            storage = parameter.untyped_storage()
            of_others = storage.nbytes() - parameter.nbytes
            if of_others:
                raise ValueError(
                    f"{name} is a part of {storage.nbytes()} bytes that are not its own alone: "
                    "whoever holds them, such as a training loop, gives them back"
                )
            found[storage.data_ptr()] = storage, storage.nbytes()
        copies: list[Tensor | None] = [None] * len(found)
        if keep:
            try:
                copies = [_bytes_of(storage).cpu().clone() for storage, _ in found.values()]
            except RuntimeError as error:
                raise MemoryError(f"the host has no room for the weights ({error})") from error
        for (storage, size), kept in zip(found.values(), copies):
            storage.resize_(0)
            self._released.append((storage, size, kept))

    def reacquire(self) -> None:
        """Allocate the memory again, with its values if they were kept, or else zeros.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        try:
            for storage, size, _ in self._released:
                storage.resize_(size)
        except RuntimeError as error:
            for storage, _, _ in self._released:
                storage.resize_(0)
            total = sum(size for _, size, _ in self._released)
            raise MemoryError(
                f"the device has no room for {total} bytes of weights ({error})"
            ) from error
        released, self._released = self._released, []
        for storage, _, kept in released:
            # Zeros if there are no values: the new memory may hold NaN.
            _bytes_of(storage).copy_(kept) if kept is not None else _bytes_of(storage).zero_()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
