"""EngineCore: one step of serving: schedule → prepare → execute → sample → update."""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mfs_trt.engine import load_engine
from mfs_trt.engine.interface import Engine, StepOutput
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import InvalidRequestError
from mfs_trt.kv_cache.manager import KVCacheManager
from mfs_trt.request import FinishReason, PromptRequest, Request, TokenEvent
from mfs_trt.sampling.sampler import Sample, SamplingRow, sample
from mfs_trt.scheduler.batch import prepare
from mfs_trt.scheduler.output import SchedulerOutput
from mfs_trt.scheduler.scheduler import Scheduler
from mfs_trt.scheduler.tier_policy import choose_tier
from mfs_trt.serving.text_stream import TextStream
from mfs_trt.tokenizer import Tokenizer


class EngineCore:
    """The scheduler, the engine and the text of all requests. One thread calls it.

    `tokenizer` None serves token ids only.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.family = engine.family
        self.limits = engine.limits
        self.last_step_duration_s = 0.0
        self.num_steps = 0
        self.reset()

    def reset(self) -> None:
        """Forget every request and all KV content: what a failed step leaves is not trusted."""
        kv_cache = KVCacheManager(
            self.engine.kv_spec, self.limits.max_num_seqs, self.limits.max_model_len
        )
        self.scheduler = Scheduler(self.limits, kv_cache)
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
        tier = choose_tier(prompt_request, self.family)
        token_ids = self._prompt_token_ids(prompt_request)
        now = time.monotonic()
        deadline = prompt_request.deadline_s
        base_seed = secrets.randbits(64) if params.seed is None else params.seed
        bad_words = prompt_request.bad_token_ids
        if params.bad_words:
            bad_words += self._require_tokenizer("bad_words").encode_words(params.bad_words)
        requests = [
            Request(
                request_id=f"{prompt_request.request_id}#{i}",
                prompt_request=prompt_request,
                sequence_index=i,
                prompt_token_ids=token_ids,
                tier=tier,
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

    def abort(self, request_id: str) -> None:
        """End every sequence of `request_id` and free its memory; unknown ids are ignored."""
        for request in list(self.scheduler.requests.values()):
            if request.prompt_request.request_id == request_id:
                self.scheduler.finish(request, FinishReason.ABORT)
                self._texts.pop(request.request_id, None)

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step and return what it produced, at most one event per sequence."""
        started = time.monotonic()
        output = self.scheduler.schedule()
        assert not output.is_empty, "requests wait, but nothing can be scheduled"
        self._stamp(output, started)
        kv_cache = self.scheduler.kv_cache
        step_input = prepare(output, kv_cache.tables.segments, kv_cache.spec.block_size)
        step_output = self.engine.execute(step_input)
        requests, logits = self._sampled_rows(output, step_output)
        samples = sample_rows(requests, logits)
        self.scheduler.update(
            output, {r.request_id: s.token_id for r, s in zip(requests, samples, strict=True)}
        )
        events = self._events(requests, samples, logits)
        self.num_steps += 1
        self.last_step_duration_s = time.monotonic() - started
        return events

    def _stamp(self, output: SchedulerOutput, now_s: float) -> None:
        """Remember when each request was first scheduled."""
        for request_id, _ in output.computed:
            request = self.scheduler.requests[request_id]
            if request.first_scheduled_time_s is None:
                request.first_scheduled_time_s = now_s

    def _sampled_rows(
        self, output: SchedulerOutput, step_output: StepOutput
    ) -> tuple[list[Request], list[np.ndarray]]:
        """The requests that get a token in this step, and their logits per exit."""
        requests = [
            self.scheduler.requests[request_id] for ids in output.sampled for request_id in ids
        ]
        logits = [rows for rows in step_output.logits if rows is not None]
        return requests, logits

    def _events(
        self, requests: Sequence[Request], samples: Sequence[Sample], logits: list[np.ndarray]
    ) -> list[TokenEvent]:
        rows = (row for exit_logits in logits for row in exit_logits)
        return [
            self._event(request, sampled, row)
            for request, sampled, row in zip(requests, samples, rows, strict=True)
        ]

    def _event(self, request: Request, sampled: Sample, logits: np.ndarray) -> TokenEvent:
        params = request.params
        text = ""
        stream = self._texts.get(request.request_id)
        if stream is not None:
            ends = request.finish_reason is FinishReason.STOP
            text, stopped = stream.push([sampled.token_id], ends)
            if stopped:
                if not request.is_finished:
                    self.scheduler.finish(request, FinishReason.STOP)
                request.finish_reason = FinishReason.STOP
            if request.is_finished:
                text += stream.finish()
                del self._texts[request.request_id]
        if params.return_log_probs:
            request.cumulative_log_prob += sampled.log_prob
        return TokenEvent(
            request_id=request.prompt_request.request_id,
            sequence_index=request.sequence_index,
            token_ids=(sampled.token_id,),
            text=text,
            log_probs=(sampled.log_prob,) if params.return_log_probs else (),
            logits=logits[None].astype(np.float32) if params.return_generation_logits else None,
            cumulative_log_prob=request.cumulative_log_prob,
            finish_reason=request.finish_reason,
            tier=self.family.tiers[request.tier].name,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_kv_blocks=self.engine.kv_spec.blocks_needed(request.tier, request.num_tokens - 1),
            first_scheduled_time_s=request.first_scheduled_time_s or 0.0,
        )

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


def sample_rows(requests: Sequence[Request], logits: Sequence[np.ndarray]) -> list[Sample]:
    """One token for each request, from its row of the exits' logits, in their order."""
    samples: list[Sample] = []
    start = 0
    for exit_logits in logits:
        part = requests[start : start + len(exit_logits)]
        start += len(exit_logits)
        samples += sample(exit_logits, [_sampling_row(request) for request in part])
    return samples


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        end_token_ids=request.end_token_ids,
        bad_token_ids=request.bad_token_ids,
    )


def load_core(engine_dir: Path | str) -> EngineCore:
    """Everything that serves an engine folder: engine, tokenizer, scheduler."""
    engine = load_engine(engine_dir)
    family_dir = Path(EngineManifest.load(engine_dir).family)
    has_tokenizer = any(family_dir.glob("tokenizer*"))
    return EngineCore(engine, Tokenizer(family_dir) if has_tokenizer else None)
