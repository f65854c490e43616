"""A family's tier as a model of lm-evaluation-harness, under the name `mfs`.

The harness's own command, with `mfs` among its models:

    python -m mfs_trt.evaluation.lm_eval_model run --model mfs \\
        --model_args family=family,tier=small --tasks piqa,openbookqa,boolq

Likelihoods are computed in torch over whole sequences; texts that tasks let the model write come
from the engine that serves the family.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from mfs_trt.builder.cache import resolve_engine
from mfs_trt.dtypes import torch_dtype
from mfs_trt.engine.manifest import EngineManifest
from mfs_trt.errors import ConfigError
from mfs_trt.llm import LLM
from mfs_trt.model.sequences import boundaries
from mfs_trt.model.transformer import NestedModel
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.tokenizer import Tokenizer
from mfs_trt.weights.store import WeightStore

_DEFAULT_BATCH_SIZE = 8
_DEFAULT_MAX_LENGTH = 2048
_DEFAULT_NEW_TOKENS = 256
_READ_ARGUMENTS = ("until", "max_gen_toks", "temperature", "do_sample", "top_p", "top_k")

# (context and continuation as text or None, the context's ids, the continuation's ids)
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("mfs")
class TierLM(TemplateLM):
    """One tier of a family folder; the deepest unless `tier` names another."""

    def __init__(
        self,
        family: str,
        tier: str | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        batch_size: int | str = _DEFAULT_BATCH_SIZE,
        max_batch_size: int | None = None,  # the harness gives it; only `auto` would ask for it
        device: str | None = None,
    ) -> None:
        """Raises `FamilyError` for an unknown tier or a folder without tokenizer, `ConfigError` for
        a dtype or length that the model does not have.
        """
        super().__init__()
        store = WeightStore(family)
        self._family_folder, self._spec = family, store.spec
        self._tier = tier or store.spec.tiers[-1].name
        self._segment = store.spec.tier_index(self._tier)
        limit = store.spec.model.max_position_embeddings
        self.max_length = max_length or min(limit, _DEFAULT_MAX_LENGTH)
        if not 1 <= self.max_length <= limit:
            raise ConfigError(f"max_length: expected 1 to {limit}, got {self.max_length}")
        auto = str(batch_size).startswith("auto")
        self.batch_size = max_batch_size or _DEFAULT_BATCH_SIZE if auto else int(batch_size)
        self._device = _available(device)
        model = NestedModel.from_store(store, self.max_length, torch_dtype(dtype))
        self._model = model.to(self._device)
        self._text = Tokenizer(family)
        self.tokenizer = AutoTokenizer.from_pretrained(family, local_files_only=True)
        self._engine: tuple[LLM, int] | None = None  # and its tokens per request

    # -- text ------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        ends = self._spec.end_token_ids or self._text.end_token_ids
        if not ends:
            raise ConfigError(f"{self._family_folder}: expected an end token, it has none")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before an empty context: the begin token where there is one."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return f"{self._family_folder}@{self._spec.revision[:12]}".replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = begin is None or not string.startswith(begin)
        return self._text.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # -- likelihoods -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy continuation) of each; long contexts lose their start.

        Batches hold requests of similar length, the longest first.
        """
        longest = self.max_length + 1  # the last token is predicted, not seen
        rows = [(context + continuation)[-longest:] for _, context, continuation in requests]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        progress = tqdm(total=len(rows), disable=disable_tqdm, desc=f"mfs {self._tier}")
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            lengths = [min(len(requests[i][2]), len(rows[i]) - 1) for i in batch]
            scores = self._scores([rows[i] for i in batch], lengths)
            for i, score in zip(batch, scores, strict=True):
                results[i] = score
                texts = requests[i][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, score)
            progress.update(len(batch))
        progress.close()
        return results

    @torch.inference_mode()
    def _scores(
        self, rows: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[tuple[float, bool]]:
        """Score the last `lengths[i]` tokens of `rows[i]`. Padding stands behind, where no row
        sees it.
        """
        longest = max(1, max(len(row) for row in rows) - 1)
        input_ids = torch.zeros((len(rows), longest), dtype=torch.int64)
        for i, row in enumerate(rows):
            input_ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        hidden = boundaries(self._model, input_ids.to(self._device), self._segment)[-1]
        scores = []
        for i, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            end = len(row) - 1
            logits = self._model.exit_logits(self._segment, hidden[i, end - count : end])
            targets = torch.tensor(row[len(row) - count :], device=self._device)
            log_probs = F.log_softmax(logits, -1, dtype=_wide(logits.dtype))
            picked = log_probs.gather(-1, targets[:, None])
            scores.append((float(picked.sum()), bool((logits.argmax(-1) == targets).all())))
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, each token once, windows of `max_length`."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scored = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(score for score, _ in self._loglikelihood_tokens(scored, disable_tqdm))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    # -- generation ------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to their stop words, all in one batch of the serving engine."""
        if self._engine is None:
            folder = resolve_engine(self._family_folder)
            self._engine = LLM(folder), EngineManifest.load(folder).limits.max_model_len
        llm, limit = self._engine
        prompts, params = [], []
        for request in requests:
            context, arguments = request.args
            found = sampling_params(arguments)
            if found.max_tokens >= limit:
                raise ConfigError(f"max_gen_toks: expected below {limit}, got {found.max_tokens}")
            prompts.append(self.tok_encode(context)[-(limit - found.max_tokens) :])
            params.append(found)
        outputs = llm.generate(prompts, params, tier=self._tier)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def sampling_params(arguments: dict[str, Any]) -> SamplingParams:
    """A task's `generation_kwargs` → ours; greedy unless `do_sample`. Raises `ConfigError` naming
    one that is not known.
    """
    unknown = sorted(set(arguments) - set(_READ_ARGUMENTS))
    if unknown:
        raise ConfigError(
            f"generation_kwargs: expected some of {', '.join(_READ_ARGUMENTS)}, "
            f"got {', '.join(unknown)}"
        )
    until = arguments.get("until") or ()
    words = (until,) if isinstance(until, str) else tuple(until)
    is_sampled = arguments.get("do_sample", False)
    return SamplingParams(
        max_tokens=int(arguments.get("max_gen_toks", _DEFAULT_NEW_TOKENS)),
        stop=tuple(word for word in words if word),
        temperature=arguments.get("temperature") if is_sampled else None,
        top_p=arguments.get("top_p") if is_sampled else None,
        top_k=int(arguments.get("top_k") or 0) if is_sampled else 0,
    )


def _available(device: str | None) -> torch.device:
    """The harness asks for `cuda:0` unless told otherwise, whatever machine it runs on."""
    is_missing = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
    return torch.device("cpu" if is_missing else device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def main() -> None:
    """The harness's command, which knows the model `mfs` by this module's import."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
