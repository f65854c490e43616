"""read_documents: what each kind of file holds, in which order, and errors that name the place."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.precipitation.documents import read_documents
from mfs_trt.tokenizer import Tokenizer
from tiny_tokenizers import END, build_tokenizer

CHAT = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine."}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return build_tokenizer("byte_level", tmp_path_factory.mktemp("tokenizer"))


def texts(path: Path, tokenizer: Tokenizer, **options) -> list[str]:
    found = read_documents(path, tokenizer, **options)
    return [tokenizer.decode(document.token_ids.tolist()) for document in found]


def write(file: Path, content: str | bytes) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def lines_of(*rows: dict) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def error_of(path: Path, tokenizer: Tokenizer, **options) -> str:
    with pytest.raises(ConfigError) as error:
        list(read_documents(path, tokenizer, **options))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_text_file_is_one_document_of_int32_ids_all_trained(tmp_path, tokenizer):
    text = "One two three.\n\nFour five six.\n"
    (document,) = read_documents(write(tmp_path / "a.txt", text), tokenizer)
    assert document.token_ids.tolist() == tokenizer.encode(text.removesuffix("\n"))
    assert document.token_ids.dtype == np.int32
    assert document.is_trained.dtype == bool and document.is_trained.all()


def test_a_line_of_the_end_token_alone_separates_documents_of_a_text_file(tmp_path, tokenizer):
    text = f"One two.\nThree.\n{END}\n  \n{END}\nFour {END} five.\n{END}\n"
    found = texts(write(tmp_path / "a.txt", text), tokenizer)
    assert found == ["One two.\nThree.", "Four  five."]


def test_windows_line_ends_and_byte_order_mark_are_no_part_of_the_text(tmp_path, tokenizer):
    file = write(tmp_path / "a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert texts(file, tokenizer) == ["One.\nTwo."]
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "One."}\r\n{"text": "Two."}')
    assert texts(file, tokenizer) == ["One.", "Two."]


def test_json_rows_give_the_text_under_the_key(tmp_path, tokenizer):
    rows = {"text": "One.", "story": "Grüße."}, {"story": "Two.\n\nThree.", "n": 3}
    file = write(tmp_path / "a.jsonl", lines_of(*rows) + "\n")
    assert texts(file, tokenizer, text_key="story") == ["Grüße.", "Two.\n\nThree."]


def test_empty_texts_among_others_are_passed_over(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", lines_of({"text": ""}, {"text": "One."}, {"text": ""}))
    assert texts(file, tokenizer) == ["One."]


def test_a_chat_row_is_trained_on_the_assistants_turns_only(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", lines_of({"messages": CHAT, "text": "not this"}))
    (document,) = read_documents(file, tokenizer)
    said = document.token_ids[document.is_trained].tolist()
    assert tokenizer.decode(said, skip_special_tokens=False) == f"I am fine.{END}"
    assert len(document.token_ids) > len(said)


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path, tokenizer):
    (tmp_path / "b").mkdir()
    write(tmp_path / "c.jsonl", lines_of({"text": "Three."}))
    write(tmp_path / "b" / "z.txt", "Two.")
    write(tmp_path / "a.txt", "One.")
    write(tmp_path / ".hidden.txt", "Never.")
    write(tmp_path / "_progress.csv", "Never.")
    assert texts(tmp_path, tokenizer) == ["One.", "Two.", "Three."]


def test_parquet_rows_are_texts_and_chats(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"text": ["One.", "", "Two."]}), tmp_path / "a.parquet")
    write_table(pyarrow.table({"messages": [CHAT]}), tmp_path / "b.parquet")
    *plain, chat = read_documents(tmp_path, tokenizer)
    assert [tokenizer.decode(document.token_ids.tolist()) for document in plain] == ["One.", "Two."]
    assert 0 < chat.is_trained.sum() < len(chat.token_ids)


def test_parquet_errors_name_file_and_row(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    from pyarrow.parquet import write_table

    file = tmp_path / "a.parquet"
    write_table(pyarrow.table({"text": ["One.", None]}), file)
    assert f"{file}, row 2: text: expected a string, got NoneType" in error_of(file, tokenizer)
    write(file, "no parquet at all")
    assert f"{file}: expected a parquet file" in error_of(file, tokenizer)


def test_saved_datasets_are_read_and_of_several_splits_train(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    one = datasets.Dataset.from_dict({"text": ["One.", "Two."]})
    other = datasets.Dataset.from_dict({"text": ["Three."]})
    one.save_to_disk(tmp_path / "single")
    datasets.DatasetDict(train=one, test=other).save_to_disk(tmp_path / "several")
    datasets.DatasetDict(test=other).save_to_disk(tmp_path / "without")
    datasets.Dataset.from_dict({"text": ["One.", None]}).save_to_disk(tmp_path / "bad")
    assert texts(tmp_path / "single", tokenizer) == ["One.", "Two."]
    assert texts(tmp_path / "several", tokenizer) == ["One.", "Two."]
    assert texts(tmp_path / "several" / "test", tokenizer) == ["Three."]
    assert "expected a split 'train', got test" in error_of(tmp_path / "without", tokenizer)
    assert f"{tmp_path / 'bad'}, row 2: text: expected" in error_of(tmp_path / "bad", tokenizer)


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "pyarrow"), ("state.json", "datasets")]
)
def test_a_package_that_is_not_installed_is_named(tmp_path, tokenizer, monkeypatch, name, package):
    write(tmp_path / name, "{}")
    write(tmp_path / "dataset_info.json", "{}")
    path = tmp_path / name if package == "pyarrow" else tmp_path
    real_import = builtins.__import__

    def fake_import(module, *arguments, **options):
        if module.split(".")[0] == package:
            raise ImportError(module)
        return real_import(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fake_import)
    assert f"pip install {package}" in error_of(path, tokenizer)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ": expected at least one document, got none"),
        ("\n \n", ": expected at least one document, got none"),
        ('{"text": ""}\n', ": expected at least one document, got none"),
        ('{"text": "a"}\n{"txt": "b", "n": 1}\n', ":2: expected the key 'text' or 'messages'"),
        ('{"text": "a"}\n\n{"txt": "b", "n": 1}\n', ":3: expected the key 'text' or 'messages'"),
        ('{"text": "a"}\n{"text": 3}\n', ":2: text: expected a string, got int"),
        ('{"text": "a"}\n{"text": \n', ":2: expected a JSON object, got no JSON"),
        ('["text"]\n', ":1: expected a JSON object, got list"),
        ("{}\n", ":1: expected the key 'text' or 'messages', got no key"),
        ("[" * 100_000 + "\n", ":1: expected a JSON object, got "),
        ('{"text": "\\ud800"}\n', ":1: text: expected valid Unicode"),
        (b'{"text": "a"}\n{"text": "b\xff"}\n', ":2: expected UTF-8, got byte 0xff at byte 12"),
        ('{"messages": "hi"}\n', ":1: messages: expected a list, got str"),
        ('{"messages": []}\n', ":1: messages: expected at least one, got none"),
        ('{"messages": [{"content": "hi"}]}\n', ":1: messages: expected objects with strings"),
        ('{"messages": [{"role": "user", "content": "hi"}]}\n', ":1: messages: expected one of"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, tokenizer, content, expected):
    file = write(tmp_path / "a.jsonl", content)
    assert f"{file}{expected}" in error_of(file, tokenizer)


@pytest.mark.parametrize("content", ["", "\n  \n", f"{END}\n\n{END}\n"])
def test_a_text_file_without_text_is_an_error(tmp_path, tokenizer, content):
    file = write(tmp_path / "a.txt", content)
    assert f"{file}: expected at least one document" in error_of(file, tokenizer)


def test_a_text_file_that_is_not_utf8_names_the_line(tmp_path, tokenizer):
    file = write(tmp_path / "a.txt", b"One.\nTwo.\nGr\xfc\xdfe.\n")
    assert f"{file}:3: expected UTF-8, got byte 0xfc at byte 3" in error_of(file, tokenizer)


def test_one_empty_file_of_a_folder_is_an_error_that_names_it(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "One.")
    file = write(tmp_path / "b.txt", "")
    assert f"{file}: expected at least one document" in error_of(tmp_path, tokenizer)


def test_paths_that_hold_no_data_are_named(tmp_path, tokenizer):
    assert "nothing there" in error_of(tmp_path / "none", tokenizer)
    assert f"{tmp_path}: expected files of .txt, .jsonl, .parquet" in error_of(tmp_path, tokenizer)
    file = write(tmp_path / "a.csv", "text\nOne.\n")
    assert f"{file}: expected a file of .txt, .jsonl, .parquet" in error_of(tmp_path, tokenizer)


def test_a_chat_without_a_template_names_the_line(tmp_path):
    plain = build_tokenizer("byte_level", tmp_path / "plain", chat_template=None)
    file = write(tmp_path / "a.jsonl", lines_of({"messages": CHAT}))
    assert f"{file}:1: messages: the tokenizer in" in error_of(file, plain)


def test_documents_come_one_at_a_time(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", '{"text": "One."}\nno JSON\n')
    first = next(iter(read_documents(file, tokenizer)))
    assert tokenizer.decode(first.token_ids.tolist()) == "One."
