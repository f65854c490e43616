"""What the client sends and how it reads errors; talking to a server is an integration test."""

from dataclasses import fields

import grpc
import pytest

from mfs_trt import errors
from mfs_trt.client import PARAM_TENSORS, Client, server_error
from mfs_trt.sampling_params import SamplingParams
from mfs_trt.serving.triton_spec import INPUTS, Use


def test_every_sampling_parameter_goes_into_the_tensor_that_the_server_reads():
    by_tensor = {spec.name: spec for spec in INPUTS if spec.use is Use.SAMPLING}
    assert set(PARAM_TENSORS) == {field.name for field in fields(SamplingParams)}
    for field, (tensor, dtype) in PARAM_TENSORS.items():
        assert by_tensor[tensor].field == field
        assert by_tensor[tensor].dtype.replace("STRING", "BYTES") == dtype
        assert by_tensor[tensor].ensemble == tensor


REFUSED = "in ensemble 'ensemble', [UNAVAILABLE] QueueFullError: queue is full"


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        (REFUSED, None, errors.QueueFullError("queue is full")),
        ("[INVALID_ARG] FamilyError: tier: x", None, errors.FamilyError("tier: x")),
        ("no input", grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError("no input")),
        ("closed", grpc.StatusCode.UNAVAILABLE, errors.EngineUnavailableError("closed")),
        ("strange", None, errors.ServerError("strange")),
    ],
)
def test_an_error_of_the_server_is_raised_as_the_class_that_it_names(text, code, expected):
    error = server_error(text, code)
    assert type(error) is type(expected) and str(error) == str(expected)


def test_a_prompt_or_messages_but_not_both():
    with Client("127.0.0.1:1") as client:
        for more in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
            with pytest.raises(errors.InvalidRequestError, match="either a prompt or messages"):
                list(client.stream(**more))


def test_a_misspelt_argument_is_an_error():
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="teir"):
        list(client.stream("a", teir="small"))
