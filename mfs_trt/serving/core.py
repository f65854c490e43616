"""EngineCore: one step of serving: schedule → prepare → execute → sample → update."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import Engine
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import InvalidRequestError
from mfs_trt.kv_cache.manager import KVCacheManager
from mfs_trt.request import FinishReason, PromptRequest, Request, TokenEvent
from mfs_trt.scheduler.batch import prepare
from mfs_trt.scheduler.drafting import Drafting
from mfs_trt.scheduler.output import SchedulerOutput
from mfs_trt.scheduler.pacing import Pacing
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.scheduler.step_cost import StepCost, work_of_step
from mfs_trt.scheduler.tier_policy import EXPLICIT, choose_draft_levels, choose_policy
from mfs_trt.serving.decisions import Decision, cut, decide
from mfs_trt.serving.steering import Steering, SwitchCounter
from mfs_trt.serving.text_stream import TextStream
from mfs_trt.tokenizer import Tokenizer


class EngineCore:
    """The scheduler, the engine and the text of all requests. One thread calls it.

    `tokenizer` None serves token ids only.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        pacing: Pacing | None = None,
        tier_policy: str = EXPLICIT,
    ) -> None:
        """`pacing`: keeps running decodes going while prompts are computed, and drafts as far as it
        pays; None: prompts take all rows, and drafts are as many as asked for.
        `tier_policy`: of requests that name neither a policy nor a tier.
        """
        self.engine = engine
        self.pacing = pacing
        self.tokenizer = tokenizer
        self.family = engine.family
        self.limits = engine.limits
        self.last_step_duration_s = 0.0
        self.num_steps = 0
        self.num_tier_switches: SwitchCounter = SwitchCounter()
        self._tier_policy = tier_policy
        self.reset()

    def reset(self) -> None:
        """Forget every request and all KV content: what a failed step leaves is not trusted."""
        kv_cache = KVCacheManager(
            self.engine.kv_spec,
            self.limits.max_num_seqs,
            self.limits.max_model_len,
            self.family.revision,
        )
        drafting = None if self.pacing is None else Drafting(self.pacing.cost)
        self.scheduler = Scheduler(self.limits, kv_cache, self.pacing, drafting)
        self._steering = Steering(self.scheduler, self.pacing, self.num_tier_switches)
        self._texts: dict[str, TextStream] = {}

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    # -- requests --------------------------------------------------------------------------------

    def make_requests(self, prompt_request: PromptRequest) -> list[Request]:
        """Check and tokenise: one `Request` per sequence. Changes nothing; any thread may call it.

        Raises `InvalidRequestError`, `RequestTooLargeError` or `FamilyError` (unknown tier).
        """
        params = prompt_request.params
        policy = choose_policy(prompt_request, self.family, self._tier_policy)
        draft_levels = choose_draft_levels(prompt_request, self.family, policy.start)
        token_ids = self._prompt_token_ids(prompt_request)
        now = time.monotonic()
        deadline = prompt_request.deadline_s
        base_seed = secrets.randbits(64) if params.seed is None else params.seed
        bad_words = prompt_request.bad_token_ids
        if params.bad_words:
            bad_words += self._require_tokenizer("bad_words").encode_words(params.bad_words)
        requests = [
            Request(
                request_id=sequence_id(prompt_request.request_id, i),
                prompt_request=prompt_request,
                sequence_index=i,
                prompt_token_ids=token_ids,
                tier=policy.start,
                highest_tier=policy.start if policy.name == EXPLICIT else policy.high,
                draft_levels=draft_levels,
                params=params,
                seed=(base_seed + i) % 2**64,
                end_token_ids=self._end_token_ids(prompt_request),
                bad_token_ids=bad_words,
                arrival_time_s=now,
                deadline_time_s=None if deadline is None else now + deadline,
            )
            for i in range(params.n)
        ]
        self.scheduler.check_fits(requests[0])
        return requests

    def add(self, request: Request) -> None:
        """Queue a request of `make_requests`."""
        if self.tokenizer is not None:
            stop_texts = [
                self.tokenizer.decode(ids, skip_special_tokens=False)
                for ids in request.prompt_request.stop_token_ids
            ]
            self._texts[request.request_id] = TextStream(self.tokenizer, request.params, stop_texts)
        self.scheduler.add(request)
        policy = choose_policy(request.prompt_request, self.family, self._tier_policy)
        self._steering.add(request, policy, time.monotonic())

    def abort(self, request_id: str) -> None:
        """End every sequence of `request_id` and free its memory; unknown ids are ignored."""
        for request in list(self.scheduler.requests.values()):
            if request.prompt_request.request_id == request_id:
                self.scheduler.finish(request, FinishReason.ABORT)
                self._texts.pop(request.request_id, None)

    def switch_tier(self, request_id: str, tier: str) -> None:
        """Run every sequence of an open request at another tier from its next token on.

        That ends the request's policy. Unknown ids are ignored: the request may have ended. Raises
        `FamilyError` for an unknown tier, `RequestTooLargeError` when the arena could never hold
        the request there.
        """
        index = self.family.tier_index(tier)
        for request in list(self.scheduler.requests.values()):
            if request.prompt_request.request_id == request_id:
                self._steering.switch(request, index)

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step and return what it produced, at most one event per sequence."""
        return [self.add_text(event) for event in self.step_tokens()]

    def step_tokens(self) -> list[TokenEvent]:
        """`step` without the text that no decision waits for.

        `add_text` makes it, in any thread, at any time before the sequence's next event.
        """
        started = time.monotonic()
        output = self.scheduler.schedule()
        assert not output.is_empty, "requests wait, but nothing can be scheduled"
        self._stamp(output, started)
        kv_cache = self.scheduler.kv_cache
        step_input = prepare(output, kv_cache.tables, kv_cache.spec.block_size)
        step_output = self.engine.execute(step_input)
        decisions = decide(output, step_output, self.scheduler.requests)
        self.scheduler.update(output, {d.request.request_id: d for d in decisions})
        events = [self._event(d) for d in decisions if d.is_final]
        self.num_steps += 1
        self.last_step_duration_s = time.monotonic() - started
        if self.pacing is not None:
            work = work_of_step(output.segments, kv_cache.spec.groups_per_segment)
            self.pacing.cost.observe(work, self.last_step_duration_s)
        self._steering.after_step(decisions, time.monotonic())
        return events

    def add_text(self, event: TokenEvent) -> TokenEvent:
        """The event with its text, unless it has it already: stop words are looked for within the
        step.
        """
        if event.error is not None:
            return event
        key = sequence_id(event.request_id, event.sequence_index)
        stream = self._texts.get(key)
        if stream is None or stream.has_stop_words:
            return event
        text, _ = stream.push(event.token_ids, event.finish_reason is FinishReason.STOP)
        if event.finish_reason is not None:
            text += stream.finish()
            self._texts.pop(key, None)  # the engine thread may have dropped it meanwhile
        return replace(event, text=text)

    def _stamp(self, output: SchedulerOutput, now_s: float) -> None:
        """Remember when each request was first scheduled."""
        for request_id, _ in output.computed:
            request = self.scheduler.requests[request_id]
            if request.first_scheduled_time_s is None:
                request.first_scheduled_time_s = now_s

    def _event(self, decision: Decision) -> TokenEvent:
        """What the caller hears of final tokens; stop words may still cut them."""
        request = decision.request
        params = request.params
        num_kept = request.num_output_tokens - request.num_reported_tokens
        decision = cut(decision, num_kept)
        stream = self._texts.get(request.request_id)
        text = ""
        if stream is not None and stream.has_stop_words:
            text, num_kept = self._text_with_stop_words(stream, request, decision.token_ids)
            decision = cut(decision, num_kept)
        request.num_reported_tokens += num_kept
        request.cumulative_log_prob += sum(decision.log_probs)
        logits = decision.logits.astype(np.float32) if params.return_generation_logits else None
        return TokenEvent(
            request_id=request.prompt_request.request_id,
            sequence_index=request.sequence_index,
            token_ids=decision.token_ids,
            text=text,
            log_probs=decision.log_probs,
            logits=logits,
            cumulative_log_prob=request.cumulative_log_prob,
            finish_reason=request.finish_reason,
            tier=self.family.tiers[request.tier].name,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_reported_tokens,
            num_kv_blocks=self.engine.kv_spec.blocks_needed(
                request.tier, request.num_final_tokens - 1
            ),
            num_reused_blocks=request.num_reused_blocks,
            num_draft_tokens=request.num_drafted,
            num_accepted_draft_tokens=request.num_drafts_accepted,
            drafts_by_level=self._drafts_by_level(request) if request.is_finished else (),
            first_scheduled_time_s=request.first_scheduled_time_s or 0.0,
        )

    def _drafts_by_level(self, request: Request) -> tuple[tuple[str, int, int], ...]:
        names = [self.family.tiers[tier].name for tier in request.asked_draft_levels]
        counts = zip(names, request.drafted_by_level, request.accepted_by_level, strict=True)
        return tuple(counts)

    def _text_with_stop_words(
        self, stream: TextStream, request: Request, token_ids: Sequence[int]
    ) -> tuple[str, int]:
        """New text, and how many of the tokens it takes; finishes a request at a stop word."""
        text, stopped = "", False
        used = 0
        for token_id in token_ids:
            used += 1
            ends = used == len(token_ids) and request.finish_reason is FinishReason.STOP
            part, stopped = stream.push([token_id], ends)
            text += part
            if stopped:
                break
        if stopped:
            if not request.is_finished:
                self.scheduler.finish(request, FinishReason.STOP)
            request.finish_reason = FinishReason.STOP
        if request.is_finished:
            text += stream.finish()
            del self._texts[request.request_id]
        return text, used

    # -- prompts ---------------------------------------------------------------------------------

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{field}: expected token ids, for this family has no tokenizer"
            )
        return self.tokenizer

    def _prompt_token_ids(self, request: PromptRequest) -> list[int]:
        given = [f for f in ("prompt", "token_ids", "messages") if getattr(request, f) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "prompt: expected exactly one of prompt, token_ids and messages, "
                f"got {', '.join(given) or 'none'}"
            )
        if request.prompt is not None:
            token_ids = self._require_tokenizer("prompt").encode(request.prompt)
        elif request.messages is not None:
            token_ids = self._require_tokenizer("messages").apply_chat_template(request.messages)
        else:
            assert request.token_ids is not None
            token_ids = [int(t) for t in request.token_ids]
        if not token_ids:
            raise InvalidRequestError(f"{given[0]}: expected at least one token, got none")
        vocab_size = self.family.model.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidRequestError(
                f"{given[0]}: expected token ids from 0 to {vocab_size - 1}, got {wrong}"
            )
        return token_ids

    def _end_token_ids(self, request: PromptRequest) -> frozenset[int]:
        """Tokens that end the text. `end_id` outside the vocabulary, as -1, ends nothing."""
        params = request.params
        if params.ignore_eos:
            return frozenset()
        if params.end_id is not None:
            is_token = 0 <= params.end_id < self.family.model.vocab_size
            return frozenset({params.end_id} if is_token else ())
        return frozenset(self.family.end_token_ids)


def sequence_id(request_id: str, sequence_index: int) -> str:
    """Id of one sequence of a request."""
    return f"{request_id}#{sequence_index}"


def load_core(
    engine_dir: Path | str, *, max_step_s: float | None = None, tier_policy: str = EXPLICIT
) -> EngineCore:
    """Everything that serves an engine folder: engine, tokenizer, scheduler.

    `max_step_s`: longest step that prompts may cause beside running decodes; by default less than
    twice a decode step. `tier_policy`: of requests that name none.
    """
    engine = load_engine(engine_dir)
    family_dir = Path(EngineManifest.load(engine_dir).family)
    has_tokenizer = any(family_dir.glob("tokenizer*"))
    tokenizer = Tokenizer(family_dir) if has_tokenizer else None
    cost = StepCost(engine.kv_spec.groups_per_segment)
    return EngineCore(engine, tokenizer, Pacing(cost, max_step_s=max_step_s), tier_policy)
