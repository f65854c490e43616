"""encode_chat: exactly what the assistant says is marked, with every kind of tokenizer."""

import pytest

from mfs_trt.errors import InvalidRequestError
from mfs_trt.precipitation.assistant_turns import encode_chat
from mfs_trt.tokenizer import Tokenizer
from tiny_tokenizers import END, KINDS, build_tokenizer

CHAT = [
    {"role": "system", "content": "I am fine."},
    {"role": "user", "content": "Hello world, how are you?"},
    {"role": "assistant", "content": "I am fine, thank you. 好 é"},
    {"role": "user", "content": "One two three."},
    {"role": "assistant", "content": "four\n\nfive "},
]
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
JOINED = "{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}{% if loop.last CONDITION %}<think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return build_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


def turns(messages: list[dict], tokenizer: Tokenizer) -> list[str]:
    """The text of each run of marked tokens."""
    token_ids, is_said = encode_chat(messages, tokenizer)
    runs: list[list[int]] = []
    previous = False
    for token_id, said in zip(token_ids.tolist(), is_said.tolist(), strict=True):
        if said and not previous:
            runs.append([])
        if said:
            runs[-1].append(token_id)
        previous = said
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def test_the_ids_are_those_of_the_whole_chat(tokenizer):
    token_ids, is_said = encode_chat(CHAT, tokenizer)
    text = tokenizer.render_chat(CHAT, add_generation_prompt=False)
    assert token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert is_said.shape == token_ids.shape


def test_marked_tokens_are_those_behind_each_prompt_up_to_the_end_of_the_turn(tokenizer):
    """Against the obvious way: the tokens of the chat up to each turn, and through it."""
    token_ids, is_said = encode_chat(CHAT, tokenizer)
    expected = [False] * len(token_ids)
    for index in (2, 4):
        before = tokenizer.apply_chat_template(CHAT[:index])
        through = tokenizer.encode(
            tokenizer.render_chat(CHAT[: index + 1], False).rstrip(), add_special_tokens=False
        )
        expected[len(before) : len(through)] = [True] * (len(through) - len(before))
    assert is_said.tolist() == expected


def test_marked_text_is_the_answer_and_its_end_token(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path)
    expected = [f"{CHAT[2]['content']}{END}", f"{CHAT[4]['content']}{END}"]
    assert turns(CHAT, tokenizer) == expected


def test_a_template_that_sets_a_space_before_the_answer_counts_it_as_the_answers(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path, chat_template=INST)
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am fine."}]
    assert turns(chat + chat, tokenizer) == [f" I am fine.{END}"] * 2


def test_a_token_that_joins_the_prompts_last_character_to_the_answer_is_the_answers(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path)
    chat = [*CHAT[:2], {"role": "assistant", "content": "\n\nfour"}]
    (said,) = turns(chat, tokenizer)
    assert said == f"\n\n\nfour{END}"


def test_without_an_end_token_the_turn_ends_with_its_text(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path, chat_template=JOINED)
    assert turns(CHAT[1:3], tokenizer) == [" " + CHAT[2]["content"]]


def test_a_chat_that_the_assistant_opens_counts_its_answer_alone(tmp_path):
    tokenizer = build_tokenizer("byte_level", tmp_path)
    assert turns(CHAT[2:4], tokenizer) == [f"{CHAT[2]['content']}{END}"]


def test_a_chat_without_an_assistant_is_refused(tokenizer):
    with pytest.raises(InvalidRequestError, match="expected one of the role 'assistant', got none"):
        encode_chat(CHAT[:2], tokenizer)


@pytest.mark.parametrize("condition", ["", "and m.role == 'assistant'"])
def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, condition):
    template = FORGETFUL.replace("CONDITION", condition)
    tokenizer = build_tokenizer("byte_level", tmp_path, chat_template=template)
    with pytest.raises(InvalidRequestError, match="message 3 cannot be told from the others"):
        encode_chat(CHAT, tokenizer)
