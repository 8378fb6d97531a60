"""ModelRunner: executes plans on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.cache.index.tree import common_prefix
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.memory.cache_pool import ParkedRequest
from megatron_hybrid.inference.sampling_params import (
    DRAW_AGAIN,
    NOT_DRAWN,
    Draw,
    Sampled,
    SamplingParams,
)
from megatron_hybrid.inference.scheduling.step_plan import (
    Restore,
    Save,
    StepPlan,
    StepResult,
    Unpark,
    Work,
)
from megatron_hybrid.inference.worker.adapter_bank import AdapterBank
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.inference.worker.graph_runner import DecodeTapes, GraphRunner
from megatron_hybrid.inference.worker.sampler import (
    NUM_CANDIDATES,
    HostCopy,
    Scores,
    adjust,
    mark_failures,
    processed_log_probs,
    raw_log_probs,
    sample,
    score,
)
from megatron_hybrid.models.derived_weights import keep_derived, work_out_again
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.ops.to_device import to_device
from megatron_hybrid.utils.out_of_memory import optional_work


class ModelRunner:
    """Runs the model over one step's batch, samples, and moves bytes before and after.

    Args:
        model: in eval mode.
        context: lays out the batch; its memory is pool and live slots.
        load: starts to copy a fetch into the pool: `Fetches.load`. None if no plan has a fetch.
        logprobs_mode: as in `InferenceConfig`.
        ranks: those of the model.
        graphs: replays steps of decodes; without it all of them are launched.
        adapters: of the engine, if it has any.
        has_copies: see `Needs`.
    """

    def __init__(
        self,
        model: HybridModel,
        context: DynamicInferenceContext,
        load: Callable[[bytes, list[np.ndarray]], None] | None,
        logprobs_mode: str,
        ranks: Ranks,
        graphs: GraphRunner | None = None,
        adapters: AdapterBank | None = None,
        has_copies: bool = False,
    ):
        self.model, self._adapters = model, adapters
        self.context, self.memory = context, context.memory
        self.logprobs_mode = logprobs_mode
        self._load = load
        self.parked: dict[int, ParkedRequest] = {}
        """Bytes of preempted requests in host memory, by request id."""
        self.ranks = ranks
        self.graphs = graphs
        self.derived: dict = {}  # see `keep_derived`
        self._has_copies = has_copies
        is_alone = self.memory.device.type == "cpu" and ranks.size == 1
        self._tapes = DecodeTapes(model, context) if is_alone else None
        self._stages = model.pg_collection.pp
        self._has_stages = self._stages.size() > 1
        self._is_last_stage = model.post_process
        self._last_rank = ranks.gather(model.post_process).index(True)

    @property
    def parked_bytes(self) -> int:
        return sum(parked.num_bytes for parked in self.parked.values())

    def drop_old_weights(self) -> None:
        """Drop values derived from weights that have changed. Graphs stay if the new weights have
        the addresses of the old ones; else they are captured again."""
        if self.graphs is not None and self.graphs.hold():
            work_out_again(self.derived)
            return
        self.drop_graphs()
        if not self.memory.is_released:
            self.capture_graphs()

    def drop_graphs(self) -> None:
        """Drop graphs and tapes, and the values derived from weights, which they read."""
        if self.graphs is not None:
            self.graphs.drop()
        if self._tapes is not None:
            self._tapes.drop()
        self.derived.clear()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Make a context for a forward pass."""
        adapters = nullcontext() if self._adapters is None else self._adapters.of_rows(self.context)
        # Autocast multiplies by torch, which cannot read the copies.
        has_copies = self._has_copies and not torch.is_autocast_enabled("cpu")
        with keep_derived(self.derived, has_copies), adapters:
            yield

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture all graphs that are missing; call it between steps."""
        if self.graphs is not None:
            with self._computing():
                for size, num_rows in self.graphs.all_sizes():
                    self.graphs.capture(size, num_rows)

    def graph_counts(self) -> dict[str, int]:
        graphs = self.graphs
        return {
            "graphs": 0 if graphs is None else graphs.num_graphs,
            "graph_bytes": 0 if graphs is None else graphs.num_bytes,
            "graph_steps": 0 if graphs is None else graphs.num_replays,
        }

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute a plan, and wait for its result."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Queue the work of a plan on the device, in its order. Lack of memory in the moves and
        saves is noted in the result; in the forward and the draws it raises."""
        launched = Launched(plan)
        self._move(launched)
        if plan.work or plan.ready:
            launched.logits_nV = self.forward(plan)
            self.launch_rest(launched)
        for save in plan.saves:
            self._save_state(self.memory.slots[save.slot], save, save.request_id, launched.result)
        return launched

    def _move(self, launched: Launched) -> None:
        """Queue all that comes before the forward."""
        plan, result = launched.plan, launched.result
        for request_id in plan.drops:
            self.parked.pop(request_id, None)
        # Before all writes: this step may write the pages that the request had.
        for park in plan.parks:
            with optional_work(partial(_note, result.not_parked, park.request_id)):
                parked = self.memory.park(park.tables, park.num_tokens, park.slot)
                self.parked[park.request_id] = parked
        for key, targets in plan.loads.items():
            with optional_work(partial(_note, result.unloaded, key)):
                self._load(key, targets)
        for restore in plan.restores:
            with optional_work(partial(_note, result.unrestored, restore.request_id)):
                if isinstance(restore, Unpark):
                    self._unpark(restore)
                else:
                    self._restore(restore)

    def launch_ahead(self, plan: StepPlan, before: Launched) -> Launched:
        """Queue the forward of the step after `before`, whose tokens are only on the device yet."""
        before.keep_logits(self.graphs is not None)
        launched = Launched(plan)
        self._move(launched)
        launched.logits_nV = self.forward(plan)
        return launched

    def launch_rest(self, launched: Launched) -> None:
        """Queue what follows a forward: draws, scores, their copy to the host, and saves."""
        plan, logits_nV = launched.plan, launched.logits_nV
        if logits_nV is not None:
            drawn = launched.drawn = self.sample(plan, logits_nV)
            launched.scores = self.score(plan, logits_nV)
            tensors = [tensor for each in launched.scores.values() for tensor in each]
            if drawn is not None:
                tensors += drawn.tensors()
                self.context.drawn_tokens = drawn.tokens_n
            launched.copy = HostCopy(tensors) if tensors else None
        self._save(plan, launched.result)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the result of a step."""
        if launched.copy is not None:
            self._read(launched)
        if self.ranks.size > 1:
            self._agree(launched.plan, launched.result)
        return launched.result

    def _agree(self, plan: StepPlan, result: StepResult) -> None:
        """Make the result that of all ranks: moves for which one of them lacked memory, and the
        draws of the last pipeline stage. They exchange one message, of a length that follows from
        the plan, and none if it is empty."""
        optional = [
            *((result.not_parked, park.request_id) for park in plan.parks),
            *((result.unloaded, key) for key in plan.loads),
            *((result.unrestored, restore.request_id) for restore in plan.restores),
            *((result.unsaved, key) for key in plan.save_keys()),
        ]
        numbers = [key in failed for failed, key in optional]
        draws = plan.draws() if self._has_stages else []
        drawn = {
            request_id: [*result.accepted.get(request_id, ()), last]
            for request_id, last in result.sampled.items()
        }
        of_rows = {request_id: iter(tokens) for request_id, tokens in drawn.items()}
        rejected = Sampled(NOT_DRAWN)
        numbers += [next(of_rows.get(owner, iter(())), rejected).token for owner, _ in draws]
        agreed = self.ranks.maximum(numbers)
        for (failed, key), has_failed in zip(optional, agreed):
            if has_failed:
                failed.setdefault(key, "another rank lacked memory")
        if not self._has_stages:
            return
        tokens = agreed[len(optional) :]
        if any(work.scored for work in plan.work) or any(
            draw.params.return_log_probs for _, draw in draws
        ):
            scored = drawn, result.prompt_scores
            drawn, result.prompt_scores = self.ranks.broadcast(scored, self._last_rank)
        else:
            drawn = {}
            for (owner, _), token in zip(draws, tokens):
                drawn.setdefault(owner, []).extend([Sampled(token)] * (token != NOT_DRAWN))
        _note_drawn(result, drawn)

    def _unpark(self, unpark: Unpark) -> None:
        parked = self.parked.pop(unpark.request_id, None)
        if parked is None:
            raise MemoryError(f"request {unpark.request_id} found no host memory to be parked in")
        self.memory.unpark(parked, unpark.tables, unpark.first_block, unpark.slot)

    def _restore(self, restore: Restore) -> None:
        self.parked.pop(restore.request_id, None)  # a failed step's: it starts from the cache
        if restore.source_slot is not None:
            self.memory.copy_slot(restore.source_slot, restore.slot)
        elif restore.checkpoint_pages is not None:
            self.memory.load_checkpoint(restore.checkpoint_pages, restore.slot)
        else:
            self.memory.clear_slot(restore.slot)
        if len(restore.sources):
            self.memory.copy_pages(restore.sources, restore.targets)

    def forward(self, plan: StepPlan) -> Tensor | None:
        """Compute logits [n, V] of `num_logits` rows per `plan.work`, then one per `plan.ready`. On
        a pipeline stage before the last, return None."""
        with self._computing():
            return self._forward(plan)

    def _forward(self, plan: StepPlan) -> Tensor | None:
        if self.graphs is not None and (logits_nV := self.graphs.forward(plan)) is not None:
            return logits_nV
        self.context.begin_step(plan)
        if not plan.work:
            if not self._is_last_stage:
                return None
            return self.model.compute_logits(self.context.ready_hidden())
        if self._tapes is not None:
            return self._tapes.forward(plan)
        stages = self._stages
        if not self.model.pre_process:
            hidden = self.model.stage_input(self.context.input_ids.shape[1])
            dist.recv(hidden, group=stages, group_src=stages.rank() - 1)
            self.model.set_input_tensor(hidden)
        output = self.model(self.context.input_ids, inference_context=self.context)
        if self._is_last_stage:
            return output[0]
        dist.send(output, group=stages, group_dst=stages.rank() + 1)
        return None

    @torch.inference_mode()
    def predict(self, works: list[Work], most: list[int]) -> list[list[int]]:
        """Predict the tokens after those of some decodes with the MTP head.

        Args:
            works: each has only its request's newest token, and the draw of the next one. The live
                slot has the state before this token. Keys and values of the head are written at its
                position and at the drafts but the last.
            most: drafts of each, at least 1, descending.
        """
        drafts, hidden_Th = [], None
        with self.context.prediction.drafting(), self._computing():
            for number in range(most[0]):
                count = sum(own > number for own in most)
                at = [replace(own, start=own.start + number) for own in works[:count]]
                ids_n, logits_nV = drafts[-1] if drafts else None, None
                if self.graphs is not None and hidden_Th is None:
                    logits_nV = self.graphs.predict(StepPlan(work=at), ids_n)
                if logits_nV is None:
                    logits_nV, hidden_Th = self._predicted(at, ids_n, hidden_Th)
                draws = [
                    draw._replace(position=draw.position + number)
                    for own in at
                    for draw in own.draws.values()
                ]
                tokens_n = sample(logits_nV, draws)
                # Rows that would be drawn again take the likeliest token.
                drafts.append(torch.where(tokens_n < 0, logits_nV.argmax(-1), tokens_n))
        columns = HostCopy(drafts).wait()
        return [[column[i] for column in columns[:own]] for i, own in enumerate(most)]

    def _predicted(
        self, works: list[Work], ids_n: Tensor | None, hidden_Th: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a pass of the MTP head without a graph, and return logits [n, V] and hidden states.
        ids_n, hidden_Th: of the pass before, or None in the first one."""
        context, count = self.context, len(works)
        context.begin_step(StepPlan(work=works))
        ids_T = context.input_ids[0]
        if ids_n is None:
            hidden_Th = context.live_hidden()
        else:
            ids_T = F.pad(ids_n[:count], (0, len(ids_T) - count))
        hidden_Th = hidden_Th[:count].to(self.model.config.params_dtype)
        hidden_Th = F.pad(hidden_Th, (0, 0, 0, len(ids_T) - count))
        hidden_Th = self.model.predict(hidden_Th, ids_T, context.prediction)
        return self.model.compute_logits(hidden_Th[:count]), hidden_Th

    def sample(self, plan: StepPlan, logits_nV: Tensor) -> Drawn | None:
        """Draw the tokens of a plan on the device, or return None if it has no draws."""
        draws = [draw for _, draw in plan.draws()]
        if not draws:
            return None
        rows: list[int] = []
        end = 0
        for work in plan.work:
            end += work.num_logits
            if work.draws:
                known = end - 1 - len(work.draft_draws)
                rows += [known] * len(work.draws)
                rows += range(known + 1, end)
        for ready in plan.ready:
            rows += [end] * len(ready.draws)
            end += 1
        if rows != list(range(len(logits_nV))):
            logits_nV = logits_nV.index_select(0, to_device(rows, logits_nV.device))
        return self._draw(logits_nV, draws, NUM_CANDIDATES)

    def _draw(self, logits_nV: Tensor, draws: list[Draw], num_candidates: int) -> Drawn:
        adjusted_nV = adjust(logits_nV, draws)
        tokens_n = sample(adjusted_nV, draws, num_candidates)
        tokens_n = mark_failures(tokens_n, logits_nV, adjusted_nV)
        drawn = Drawn(logits_nV, draws, tokens_n)
        scored_nV = adjusted_nV if self.logprobs_mode == "processed_logprobs" else logits_nV
        by_top_n: dict[int, list[int]] = {}
        for row, draw in enumerate(draws):
            if draw.params.return_log_probs:
                by_top_n.setdefault(draw.params.top_n_logprobs, []).append(row)
        for top_n, group in by_top_n.items():
            group_rows = to_device(group, logits_nV.device)
            log_probs = self._log_probs(
                scored_nV.index_select(0, group_rows), [draws[row].params for row in group]
            )
            tokens = tokens_n.index_select(0, group_rows)
            own_logits = logits_nV.index_select(0, group_rows)
            drawn.scored.append((group, score(log_probs, tokens, top_n, own_logits)))
        return drawn

    def _log_probs(self, logits_nV: Tensor, params: list[SamplingParams]) -> Tensor:
        if self.logprobs_mode == "processed_logprobs":
            return processed_log_probs(logits_nV, params)
        return raw_log_probs(logits_nV)

    def score(self, plan: StepPlan, logits_nV: Tensor) -> dict[int, Scores]:
        """Compute the log-probabilities of `Work.scored`, by request id, on the device."""
        scores, start = {}, 0
        for work in plan.work:
            if work.scored is not None:
                first = start + work.scored.first - 1 - work.start
                tokens, params = work.scored.tokens, work.scored.params
                rows_TV = logits_nV[first : first + len(tokens)]
                log_probs_TV = self._log_probs(rows_TV, [params] * len(tokens))
                tokens_T = to_device(tokens, logits_nV.device)
                scores[work.request_id] = score(
                    log_probs_TV, tokens_T, params.top_n_logprobs, rows_TV
                )
            start += work.num_logits
        return scores

    def _read(self, launched: Launched) -> None:
        """Wait for draws and scores, and copy them into the result."""
        plan, drawn, result = launched.plan, launched.drawn, launched.result
        values = iter(launched.copy.wait())
        for request_id in launched.scores:
            log_probs, top_rows = next(values), _top_rows(values)
            result.prompt_scores[request_id] = log_probs, top_rows or []
        if drawn is not None:
            rows: dict[int, list[Sampled]] = {}
            owners = [owner for owner, _ in plan.draws()]
            for owner, sampled in zip(owners, self._sampled(drawn, values)):
                rows.setdefault(owner, []).append(sampled)
            result.again = {owners[row] for row in drawn.again}
            for work in plan.work:
                if work.draft_draws:
                    own = rows[work.request_id]
                    drawn_n = np.array([sampled.token for sampled in own[:-1]])
                    count = common_prefix(drawn_n, work.drafts)
                    del own[1 + count :]
            _note_drawn(result, rows)

    def _sampled(self, drawn: Drawn, values: Iterator[list]) -> list[Sampled]:
        """Return what was drawn, from the values of its tensors. Rows whose token was not among the
        candidates are drawn again from more candidates, at most from all tokens. Each such draw
        waits for the device again."""
        sampled, num_candidates = drawn.sampled(values), NUM_CANDIDATES
        while rows := [row for row, own in enumerate(sampled) if own.token == DRAW_AGAIN]:
            drawn.again.update(rows)
            num_candidates *= 16
            logits_mV = drawn.logits_nV.index_select(0, to_device(rows, drawn.tokens_n.device))
            again = self._draw(logits_mV, [drawn.draws[row] for row in rows], num_candidates)
            for row, own in zip(rows, again.sampled(iter(HostCopy(again.tensors()).wait()))):
                sampled[row] = own
        return sampled

    def _save(self, plan: StepPlan, result: StepResult) -> None:
        captured = self.context.captured_states()
        for work, first in zip(plan.work, self.context.first_captures):
            for save in work.saves:
                # The state at the end is the live slot itself.
                if save.position == work.end:
                    state = self.memory.slots[work.slot]
                else:
                    state = captured[first + work.captures.index(save.position)]
                self._save_state(state, save, work.request_id, result)

    @torch.inference_mode()
    def take_back(self, plan: StepPlan, ends: Mapping[int, int]) -> None:
        """Set the live slots of a plan that has just run to the states before its rejected drafts.

        ends: number of tokens that the state of each request is to have seen, by request id.
        """
        places = {}
        for work, first in zip(plan.work, self.context.first_captures):
            if work.draft_draws and (end := ends[work.request_id]) < work.end:
                places[work.slot] = first + work.captures.index(end)
        self.context.take_back(places)

    def _save_state(self, state: Tensor, save: Save, request_id: int, result: StepResult) -> None:
        with optional_work(partial(_note, result.unsaved, (request_id, save.position))):
            self.memory.save_checkpoint(state, save.pages)


@dataclass
class Launched:
    """A step that is queued on the device, and its results as they come."""

    plan: StepPlan
    result: StepResult = field(default_factory=StepResult)
    logits_nV: Tensor | None = None
    """It is None if there was no forward, or if another pipeline stage has the logits."""
    drawn: Drawn | None = None
    scores: dict[int, Scores] = field(default_factory=dict)
    copy: HostCopy | None = None
    """Draws and scores, if there are any."""

    def keep_logits(self, are_shared: bool) -> None:
        """Copy logits that a row may be drawn from again, before the next forward overwrites them.
        are_shared: whether all forwards write their logits to one place."""
        drawn = self.drawn
        if are_shared and drawn is not None and any(draw.may_draw_again for draw in drawn.draws):
            drawn.logits_nV = drawn.logits_nV.clone()


@dataclass
class Drawn:
    """What a step has drawn, on the device."""

    logits_nV: Tensor
    """The rows that were drawn from."""
    draws: list[Draw]
    """Those of `StepPlan.draws`."""
    tokens_n: Tensor
    """int64, from `mark_failures`."""
    scored: list[tuple[list[int], Scores]] = field(default_factory=list)
    """Numbers of the draws that need log-probabilities, and these."""
    again: set[int] = field(default_factory=set)
    """Numbers of the draws whose first token was not among the candidates."""

    def tensors(self) -> list[Tensor]:
        return [self.tokens_n, *(tensor for _, each in self.scored for tensor in each)]

    def sampled(self, values: Iterator[list]) -> list[Sampled]:
        """Return what was drawn, from the values of `tensors`."""
        sampled = [Sampled(token) for token in next(values)]
        for rows, _ in self.scored:
            log_probs, top_rows = next(values), _top_rows(values)
            for row, log_prob, top in zip(rows, log_probs, top_rows or [None] * len(rows)):
                sampled[row] = Sampled(sampled[row].token, log_prob, top)
        return sampled


def _top_rows(values: Iterator[list]) -> list[dict[int, float]]:
    """Return the most likely tokens of each row, from their log-probabilities and ids, or nothing
    if none were asked for."""
    log_probs, ids = next(values), next(values)
    return [dict(zip(*row)) for row in zip(ids, log_probs) if row[0]]


def _note_drawn(result: StepResult, drawn: dict[int, list[Sampled]]) -> None:
    """Note the accepted and last draws of each request, by its id."""
    for request_id, (*accepted, last) in drawn.items():
        result.sampled[request_id] = last
        if accepted:
            result.accepted[request_id] = accepted


def _note(failed: dict, key, error: Exception) -> None:
    failed[key] = str(error)
