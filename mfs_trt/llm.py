"""LLM: the nested model without a server. `LLM(folder).generate(prompts, params, tier="small")`."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfs_trt.errors import InvalidRequestError
from mfs_trt.request import FinishReason, PromptRequest, Request, TokenEvent
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.core import load_core

Messages = Sequence[dict[str, str]]
Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Tier = str | Sequence[str | None] | None


@dataclass
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # empty unless asked for
    cumulative_log_prob: float = 0.0
    finish_reason: FinishReason | None = None


@dataclass
class RequestOutput:
    """A finished request."""

    request_id: str
    tier: str  # that it finished at
    num_prompt_tokens: int
    outputs: list[CompletionOutput]


class LLM:
    """Offline inference on an engine folder, or on a family folder (built into the cache first).

    Not thread-safe. Raises the errors of `mfs_trt.errors` for folders and requests that cannot be
    served.
    """

    def __init__(self, model: Path | str) -> None:
        from mfs_trt.builder.cache import resolve_engine
        from mfs_trt.engine.threads import wait_passively

        wait_passively()
        self._core = load_core(resolve_engine(model))
        self.family = self._core.family
        self.tokenizer = self._core.tokenizer
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[TokenEvent]] = {}  # of the open requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        tier: Tier = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), all in one batch; results in the order given.

        `params` and `tier` hold for all prompts, or are one per prompt. `more`: further fields of
        `PromptRequest`, for all: `tier_policy`, `min_tier`, `draft_tiers`, `reuse_prefix`, …
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Sequence[Any] = [prompts] if is_one else prompts
        keys = ["prompt" if isinstance(p, str) else "token_ids" for p in several]
        fields = [{key: p, **more} for key, p in zip(keys, several, strict=True)]
        return self._run(fields, params, tier)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        tier: Tier = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the tokenizer's chat template."""
        is_one = len(messages) > 0 and isinstance(messages[0], dict)
        several: Sequence[Any] = [messages] if is_one else messages
        return self._run([{"messages": m, **more} for m in several], params, tier)

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        tier: Tier = None,
        **more: Any,
    ) -> Iterator[TokenEvent]:
        """Events of one prompt as they are made; several tiers run it side by side, in one batch.

        With several tiers, an event's `tier` tells whose it is. Leaving the loop early cancels the
        rest.
        """
        key = "messages" if messages is not None else "token_ids"
        if isinstance(prompt, str):
            key = "prompt"
        given = messages if messages is not None else prompt
        tiers = [tier] if tier is None or isinstance(tier, str) else list(tier)
        yield from self._events([{key: given, **more}] * len(tiers), params, tiers)

    def switch_tier(self, request_id: str, tier: str) -> None:
        """Run an open stream at another tier from its next token on; its events carry the id.

        Raises `FamilyError` for an unknown tier, `RequestTooLargeError` where it can never fit.
        """
        self._core.switch_tier(request_id, tier)

    def _run(
        self, prompts: list[dict[str, Any]], params: Params, tier: Tier
    ) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        for event in self._events(prompts, params, tier):
            _collect(results, event)
        return [results[request_id] for request_id in sorted(results, key=int)]

    def _events(
        self, prompts: list[dict[str, Any]], params: Params, tier: Tier
    ) -> Iterator[TokenEvent]:
        """Run the prompts; what a step makes for another open stream is kept for that."""
        sequences = self._make_requests(prompts, params, tier)
        ids = list(dict.fromkeys(s.prompt_request.request_id for s in sequences))
        num_open = len(sequences)
        self._inboxes.update((request_id, deque()) for request_id in ids)
        try:
            for sequence in sequences:
                self._core.add(sequence)
            while num_open:
                if not any(self._inboxes[request_id] for request_id in ids):
                    for event in self._core.step():
                        self._inboxes[event.request_id].append(event)
                for request_id in ids:
                    while self._inboxes[request_id]:
                        event = self._inboxes[request_id].popleft()
                        num_open -= event.finish_reason is not None
                        yield event
        finally:
            for request_id in ids:
                self._core.abort(request_id)
                del self._inboxes[request_id]

    def _make_requests(
        self, prompts: list[dict[str, Any]], params: Params, tier: Tier
    ) -> list[Request]:
        """Check all, queue none."""
        count = len(prompts)
        params = params or SamplingParams()
        all_params = [params] * count if isinstance(params, SamplingParams) else list(params)
        tiers = [tier] * count if tier is None or isinstance(tier, str) else list(tier)
        for name, values in (("params", all_params), ("tier", tiers)):
            if len(values) != count:
                raise InvalidRequestError(
                    f"{name}: expected one or {count}, as many as prompts, got {len(values)}"
                )
        sequences: list[Request] = []
        for prompt, one_params, one_tier in zip(prompts, all_params, tiers, strict=True):
            request = PromptRequest(str(next(self._ids)), one_params, tier=one_tier, **prompt)
            sequences += self._core.make_requests(request)
        return sequences


def _collect(results: dict[str, RequestOutput], event: TokenEvent) -> None:
    output = results.setdefault(
        event.request_id, RequestOutput(event.request_id, event.tier, event.num_prompt_tokens, [])
    )
    while len(output.outputs) <= event.sequence_index:
        output.outputs.append(CompletionOutput(len(output.outputs)))
    output.tier = event.tier
    completion = output.outputs[event.sequence_index]
    completion.text += event.text
    completion.token_ids += event.token_ids
    completion.log_probs += event.log_probs
    completion.cumulative_log_prob = event.cumulative_log_prob
    completion.finish_reason = event.finish_reason
