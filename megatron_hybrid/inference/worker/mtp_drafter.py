"""The drafter that runs the model's MTP head."""

from collections.abc import Mapping

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.drafters import BatchDrafter, DraftSources
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.sampling_params import Draw
from megatron_hybrid.inference.scheduling.plan_builder import tables_of
from megatron_hybrid.inference.scheduling.step_plan import Work
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.base import LayerCache


def require_mtp(model: HybridModel) -> None:
    """Raise ValueError unless the model has an MTP head that can draft."""
    if not hasattr(model, "mtp"):
        raise ValueError(
            "speculation is 'mtp', but the model has no MTP head: nothing "
            f"after '/' in its layer pattern {model.config.layer_pattern!r}. Load a folder with "
            "such weights (mtp.*) by load_pretrained(..., mtp=True), on one pipeline stage, or use "
            "speculation='lookup'."
        )
    keeps_state = any(map(_is_local, model.cache_requirements()))
    if not keeps_state and any(map(_is_local, model.prediction_requirements())):
        raise ValueError(
            f"speculation is 'mtp', and what stands after '/' in {model.config.layer_pattern!r} "
            "keeps states or a window of keys, which the layers before it do not: prompts would "
            "resume at saved states alone. Use speculation='lookup'."
        )


def cached_layers(model: HybridModel, config: InferenceConfig) -> list[LayerCache]:
    """List what layers of this rank keep: those of the model and, if it drafts, of its MTP head."""
    head = model.prediction_requirements() if config.speculation == "mtp" else []
    return model.cache_requirements() + head


def _draw(request: Request) -> Draw:
    """Return the draw of the next token, without what depends on the tokens before. A draft that is
    drawn with the same noise is more often right than the likeliest token."""
    return Draw(request.params, request.seed, request.sample_index, request.num_tokens)


def _is_local(layer: LayerCache) -> bool:
    """Return whether keys and values of all tokens do not suffice to go on at any token."""
    return bool(layer.states) or (layer.kv is not None and layer.kv.is_local)


class MTPDrafter(BatchDrafter):
    """Drafts with the model's MTP head, for all decoding requests in one pass, before the step is
    planned: `propose` returns them."""

    def __init__(self, sources: DraftSources):
        self._run = sources.predict
        self._drafts: dict[int, list[int]] = {}

    def prepare(self, most: Mapping[Request, int]) -> None:
        self._drafts = {}
        # Requests with most drafts first: later passes have only the first requests.
        requests = sorted(most, key=lambda request: -most[request])
        works = [
            Work(
                request.request_id,
                request.slot,
                request.num_computed,
                request.tokens[request.num_computed : request.num_tokens],
                request.lease.shared_tokens,
                tables_of(request.lease),
                num_logits=1,
                draws={request.request_id: _draw(request)},
            )
            for request in requests
        ]
        if works:
            drafts = self._run(works, [most[request] for request in requests])
            self._drafts = {work.request_id: own for work, own in zip(works, drafts, strict=True)}

    def propose(self, request: Request, most: int) -> list[int]:
        return self._drafts.pop(request.request_id, [])[:most]
