"""What a forward pass keeps for the backward pass."""

from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """Bytes of different tensors that autograd saves for the backward pass of a model."""

    def __init__(self, model):
        self.held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}

    def counted(self):
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.held:
            self.storages[storage.data_ptr()] = storage  # kept, so that no address is used again
        return tensor

    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())
