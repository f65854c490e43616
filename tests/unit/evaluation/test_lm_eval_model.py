"""A tier inside lm-evaluation-harness, on a task made of local files."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mfs_trt.errors import ConfigError, FamilyError
from mfs_trt.evaluation.lm_eval_model import TierLM, sampling_params
from mfs_trt.model.sequences import boundaries
from mfs_trt.model.transformer import NestedModel
from mfs_trt.weights.store import WeightStore
from tiny_folders import folder_family, write_tiny_family
from tiny_tokenizers import build_tokenizer

DOCS = [
    {"question": "Hello world, how are", "choices": [" you today", " the stop"], "answer": 0},
    {"question": "One two three", "choices": [" nine ten", " four five six"], "answer": 1},
    {"question": "I am fine,", "choices": [" thank you.", " and so on and on"], "answer": 0},
    {"question": "The stop word may", "choices": [" stand", " ten"], "answer": 1},
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {data}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-eval") / "family"
    write_tiny_family(folder, folder_family((1, 2, 4), vocab_size=512))
    build_tokenizer("byte_level", folder)
    return folder


@pytest.fixture(scope="module")
def small(family):
    return TierLM(str(family), tier="t1", batch_size=3)


def instances(*args):
    return [SimpleNamespace(args=arg) for arg in args]


def log_probs(family, tier: int, ids: list[int]) -> np.ndarray:
    """[len(ids) - 1, vocab]: of the token after each, by the plain model."""
    model = NestedModel.from_store(WeightStore(family), 256)
    with torch.inference_mode():
        hidden = boundaries(model, torch.tensor([ids[:-1]]))[tier][0]
        logits = model.exit_logits(tier, hidden).double()
    return (logits - logits.logsumexp(-1, keepdim=True)).numpy()


def by_hand(family, tier: int, context: list[int], continuation: list[int]):
    found = log_probs(family, tier, context + continuation)[len(context) - 1 :]
    total = sum(found[i, token] for i, token in enumerate(continuation))
    return total, found.argmax(-1).tolist() == continuation


def test_loglikelihood_equals_the_sum_by_hand(family, small):
    pairs = [(doc["question"], choice) for doc in DOCS for choice in doc["choices"]]
    found = small.loglikelihood(instances(*pairs), disable_tqdm=True)
    encode = small.tok_encode
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        ids = encode(context)
        expected = by_hand(family, 1, ids, encode(context + continuation)[len(ids) :])
        assert score == pytest.approx(expected[0], abs=1e-4)
        assert is_greedy == expected[1]


def test_greedy_continuation_is_seen_as_such(family, small):
    context = small.tok_encode("Hello")
    greedy = []
    for _ in range(3):
        greedy.append(int(log_probs(family, 1, [*context, *greedy, 0])[-1].argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % 512]
    found = small._loglikelihood_tokens([(None, context, greedy), (None, context, other)], True)
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_tiers_differ(family, small):
    pair = instances(("Hello world", " how are you"))
    other = TierLM(str(family), tier="t0")
    assert small.loglikelihood(pair, True) != other.loglikelihood(pair, True)
    deepest = TierLM(str(family))
    assert deepest.loglikelihood(pair, True) == TierLM(str(family), tier="t2").loglikelihood(
        pair, True
    )


def test_context_that_is_too_long_loses_its_start(family):
    short = TierLM(str(family), tier="t1", max_length=8)
    context, continuation = list(range(10, 40)), [3, 4, 5]
    ((score, _),) = short._loglikelihood_tokens([(None, context, continuation)], True)
    assert score == pytest.approx(by_hand(family, 1, context[-6:], continuation)[0], abs=1e-4)


def test_rolling_likelihood_counts_every_token_once(family, small):
    text = "One two three four five six seven eight nine ten, and so on and on."
    ids = small.tok_encode(text)
    (whole,) = small.loglikelihood_rolling(instances((text,)), True)
    expected = by_hand(family, 1, [small.prefix_token_id], ids)[0]
    assert whole == pytest.approx(expected, abs=1e-3)
    short = TierLM(str(family), tier="t1", max_length=len(ids) // 2)
    half = len(ids) // 2
    first = by_hand(family, 1, [small.prefix_token_id], ids[:half])[0]
    (split,) = short.loglikelihood_rolling(instances((text,)), True)
    assert split < 0
    assert split != pytest.approx(expected, abs=1e-3)
    assert split < first + 1e-6  # the second half's tokens cost something


def test_generation_is_the_tiers_own_up_to_the_stop_word(family, small, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids = small.tok_encode("Hello world")
    expected = []
    for _ in range(6):
        expected.append(int(log_probs(family, 1, [*ids, *expected, 0])[-1].argmax()))
    arguments = {"until": ["\u2603"], "max_gen_toks": 6, "do_sample": False}
    (text,) = small.generate_until(instances(("Hello world", arguments)))
    assert text == small._text.decode(expected)


def test_generation_arguments_are_read_and_unknown_ones_refused():
    found = sampling_params({"until": "\n", "max_gen_toks": 5, "temperature": 0.7})
    assert found.stop == ("\n",)
    assert found.max_tokens == 5
    assert found.temperature is None  # greedy unless do_sample
    assert sampling_params({"do_sample": True, "temperature": 0.7}).temperature == 0.7
    with pytest.raises(ConfigError, match="num_beams"):
        sampling_params({"num_beams": 4})


def test_unknown_tier_and_length_are_refused(family):
    with pytest.raises(FamilyError, match="t0, t1, t2"):
        TierLM(str(family), tier="huge")
    with pytest.raises(ConfigError, match="expected 1 to 256, got 300"):
        TierLM(str(family), max_length=300)


@pytest.fixture
def local_task(tmp_path, monkeypatch):
    """A folder with the task `local_choice`; nothing is fetched."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    for name, value in (("HF_HOME", tmp_path / "hf"), ("HF_HUB_OFFLINE", 1)):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def accuracy_by_hand(family, small) -> float:
    right = 0
    for doc in DOCS:
        ids = small.tok_encode(doc["question"])
        scores = [
            by_hand(family, 1, ids, small.tok_encode(doc["question"] + choice)[len(ids) :])[0]
            for choice in doc["choices"]
        ]
        right += int(np.argmax(scores)) == doc["answer"]
    return right / len(DOCS)


def test_harness_finds_the_model_by_name_and_runs_a_task_on_a_tier(family, small, local_task):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(local_task), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="mfs",
        model_args=f"family={family},tier=t1",
        tasks=["local_choice"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found["results"]["local_choice"]["acc,none"] == accuracy_by_hand(family, small)


@pytest.mark.slow
def test_harness_command_runs_a_task_on_a_tier_by_name(family, small, local_task):
    command = [sys.executable, "-m", "mfs_trt.evaluation.lm_eval_model", "run", "--model", "mfs"]
    command += ["--model_args", f"family={family},tier=t1", "--tasks", "local_choice"]
    command += ["--include_path", str(local_task), "--output_path", str(local_task / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (local_task / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["local_choice"]["acc,none"]
    assert found == accuracy_by_hand(family, small)
