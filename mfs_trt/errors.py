"""Every error that a caller can act on: one class for each thing that can be wrong.

A message names the thing, what was expected and what came.
"""


class MfsError(Exception):
    """Base of all errors raised at a border of mfs-trt."""


class CheckpointError(MfsError):
    """A source (HF folder, GGUF file, TensorRT-LLM folder) cannot be read or is not supported."""


class FamilyError(MfsError):
    """A family folder, tier or variant is missing, malformed or inconsistent."""


class EngineError(MfsError):
    """An engine folder cannot be built, loaded or run on this machine."""


class ConfigError(MfsError):
    """A configuration file or command-line value is wrong."""


class TrainingError(MfsError):
    """A training cannot start, go on or be resumed."""


class ServerError(MfsError):
    """tritonserver cannot be found, set up or started."""


class InvalidRequestError(MfsError):
    """A request's field has a value that cannot be served."""


class UnsupportedFieldError(InvalidRequestError):
    """A request sets a field that this server knows by name but does not implement."""


class RequestTooLargeError(InvalidRequestError):
    """A request can never fit: context length or KV memory."""


class QueueFullError(MfsError):
    """The waiting queue is at its limit; the request was not accepted."""


class DeadlineExceededError(MfsError):
    """A request's deadline passed before it finished."""


class RequestCancelledError(MfsError):
    """The client cancelled the request."""


class EngineFailedError(MfsError):
    """A step of the engine failed; the requests in flight were ended."""


class EngineUnavailableError(MfsError):
    """The engine is draining, stopped or unhealthy and accepts no requests."""
