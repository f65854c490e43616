"""ServeConfig from serve.json and config.pbtxt parameters."""

import json

import pytest

from mfs_trt.errors import ConfigError
from mfs_trt.serving.config import ServeConfig, load_serve_config, write_serve_config


def load(folder, data=None, **parameters):
    if data is not None:
        text = data if isinstance(data, str) else json.dumps(data)
        (folder / "serve.json").write_text(text)
    return load_serve_config(folder, parameters)


def test_what_is_written_is_read_back(tmp_path):
    config = ServeConfig(engine=str(tmp_path), max_queue_size=3, ignored_parameters=("x-*",))
    write_serve_config(tmp_path / "serve.json", config)
    assert load(tmp_path) == (config, ())


def test_an_engine_path_is_relative_to_the_version_folder(tmp_path):
    (tmp_path / "engine").mkdir()
    assert load(tmp_path, {"engine": "engine"})[0].engine == str(tmp_path / "engine")


def test_parameters_win_and_unfilled_ones_are_unset(tmp_path):
    config, ignored = load(
        tmp_path,
        {"engine": "${engine_dir}", "max_queue_size": 9},
        gpt_model_path=str(tmp_path),
        max_queue_size="${max_queue_size}",
        cancellation_check_period_ms="250",
        exclude_input_in_output="true",
        batch_scheduler_policy="max_utilization",
        gpt_model_type="",
    )
    assert config == ServeConfig(
        engine=str(tmp_path), max_queue_size=9, cancel_poll_s=0.25, excludes_input=True
    )
    assert ignored == ("batch_scheduler_policy",)


@pytest.mark.parametrize(
    ("data", "parameters", "message"),
    [
        ("{", {}, "serve.json: not valid JSON"),
        ([], {}, "serve.json: expected a JSON object"),
        ({"engine": "${engine_dir}"}, {}, r"serve.json: engine: .* unfilled '\$\{engine_dir\}'"),
        ({}, {}, "serve.json: engine: expected an engine folder"),
        ({"engine": "nowhere"}, {}, "serve.json: engine: no such folder: .*/nowhere"),
        ({}, {"gpt_model_path": "/nowhere"}, "config.pbtxt: gpt_model_path: no such folder"),
        ({"engine": ".", "max_queue": 1}, {}, "serve.json: unknown keys max_queue"),
        ({"engine": ".", "max_queue_size": "9"}, {}, "max_queue_size: expected int, got '9'"),
        ({"engine": ".", "max_queue_size": True}, {}, "max_queue_size: expected int, got True"),
        ({"engine": ".", "max_queue_size": 0}, {}, "max_queue_size: expected at least 1"),
        ({"engine": ".", "tier_policy": "luck"}, {}, "tier_policy: .* cascade, got 'luck'"),
        ({"engine": "."}, {"max_queue_size": "x"}, "parameters: max_queue_size: .* got 'x'"),
        ({"engine": "."}, {"exclude_input_in_output": "maybe"}, "expected true or false"),
    ],
)
def test_a_wrong_value_is_refused_naming_file_and_key(tmp_path, data, parameters, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, data, **parameters)
    assert "\n" not in str(caught.value)
