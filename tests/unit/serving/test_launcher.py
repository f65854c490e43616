"""What the launcher reads out of logs, libraries and metrics."""

from pathlib import Path

from mfs_trt.serving.installation import missing_library_text
from mfs_trt.serving.launcher import load_error
from mfs_trt.serving.live import Sample, format_line, read_sample


def test_the_reason_of_a_model_that_did_not_load_is_one_line():
    log = (
        'I1129 1 model_lifecycle.cc:472] "loading: family:1"\n'
        "E1129 1 model_lifecycle.cc:642] \"failed to load 'family' version 1: Internal: "
        "TritonModelException: /m/serve.json: engine: no such folder: /x"
        '\\n\\nAt:\\n  /worker.py(106): load\\n"\n'
        "error: creating server: Internal - failed to load all models\n"
    )
    assert load_error(log) == "/m/serve.json: engine: no such folder: /x"


def test_without_such_a_reason_the_last_error_of_the_log_is_told():
    assert load_error("I1 fine\nerror: bad flag\nusage\n") == "bad flag"
    assert load_error("tritonserver: cannot open shared object\n").endswith("shared object")
    assert load_error("") == "its log is empty"


def test_a_missing_libpython_names_the_package_that_has_it():
    stub = Path("/x/triton_python_backend_stub")
    text = missing_library_text(stub, "libpython3.11.so.1.0")
    assert "libpython3.11.so.1.0" in text and "apt-get install libpython3.11" in text
    assert "\n" not in text
    assert "apt-get" not in missing_library_text(stub, "libb64.so.0d")


PAGE = """
# HELP mfs_output_tokens_total Generated tokens
mfs_output_tokens_total{model="family",tier="small",version="1"} 30
mfs_output_tokens_total{model="family",tier="large",version="1"} 12
mfs_requests_finished_total{model="family",version="1"} 4
nv_trt_llm_request_metrics{model="family",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="family",request_type="waiting",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="family",version="1"} 0.25
mfs_engine_healthy{model="family",version="1"} 1
nv_inference_count{model="ensemble",version="1"} 99
"""


def test_the_live_line_shows_rates_between_two_readings():
    now = read_sample(PAGE, time_s=12.0)
    assert now == Sample(12.0, 4, 42, 3, 5, 0.25, True)
    line = format_line(Sample(10.0, num_finished=2, num_output_tokens=22), now)
    assert line == "1.0 requests/s  10 tokens/s  3 running  5 waiting  KV 25%"


def test_the_live_line_says_when_the_engine_is_unhealthy():
    sick = read_sample(PAGE.replace('1"} 1\nnv_inf', '1"} 0\nnv_inf'), 1.0)
    assert format_line(Sample(0.0), sick).endswith("ENGINE UNHEALTHY")
