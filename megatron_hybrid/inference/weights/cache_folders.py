"""CacheFolders: folders of cached content, bound to the weights that computed it."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.weights.fingerprint import fingerprint
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.offload.disk_store import DiskStore, real_path
from megatron_hybrid.offload.offload import Offload, disk_tier
from megatron_hybrid.offload.tier import Tier


class CacheFolders:
    """Opens folders for an engine. In each, a rank has one of its own.

    Args:
        name: of the rank.
        model, spec, config: what the content depends on, see `fingerprint`.
    """

    def __init__(self, name: str, model: HybridModel, spec: CacheSpec, config: InferenceConfig):
        self._name, self._page_bytes = name, spec.page_bytes
        self._content = model, spec, config
        self._is_cuda = next(model.parameters()).device.type == "cuda"

    def made_for(self) -> dict[str, str]:
        return fingerprint(*self._content)

    def open(self, folder: str | PathLike[str]) -> DiskStore:
        """Raises CacheFolderError: see `DiskStore`."""
        path = Path(folder) / self._name
        return DiskStore(path, self._page_bytes, self.made_for(), self._is_cuda)

    def save(
        self,
        offload: Offload,
        folder: str | PathLike[str] | None,
        num_bytes: int,
        let_in: Callable[[], None],
    ) -> Tier:
        """Write all that is cached; returns what the folder has then. folder: None: that of the
        disk tier. num_bytes: capacity of another one, unless it has more. let_in: see
        `Offload.save_to`."""
        tier = offload.disk
        if tier is not None and (
            folder is None or real_path(Path(folder) / self._name) == tier.store.folder
        ):
            offload.save_to(tier, let_in)
            return tier
        store = self.open(folder)
        try:
            tier = disk_tier(store, offload.spec, num_bytes, shrinks=False)
            offload.save_to(tier, let_in)
        finally:
            store.close()
        return tier
