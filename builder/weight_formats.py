"""Which weights a TensorRT build stores in fewer bits, and which GPUs take the format.

Tried with TensorRT-RTX 1.7, which builds for GPUs that are not here and names what a GPU lacks.
"""

from collections.abc import Sequence

from mfs_trt.errors import ConfigError

WEIGHT_FORMATS = ("int8", "int4", "fp8")
_FIRST_GPU = {"int8": 75, "int4": 80, "fp8": 89}  # compute capability, as of sm75
_DEFAULT_GPUS = ("sm80", "sm86", "sm89", "sm120")  # TensorRT-RTX's, when a build names none


def format_of(name: str, shape: Sequence[int], weight_format: str) -> str:
    """The format of one weight in a build of `weight_format`; empty: the build's dtype.

    Gains and biases stay as they are. LM heads are the most sensitive to rounding: 8 bits at least.
    """
    if not weight_format or len(shape) != 2:
        return ""
    is_head = not name.startswith("layers.")
    return "int8" if is_head and weight_format == "int4" else weight_format


def check_gpus(weight_format: str, target: str, gpus: Sequence[str]) -> None:
    """Raise `ConfigError` unless all `gpus`, as sm86, take the format; none: RTX's own choice."""
    first = _FIRST_GPU.get(weight_format, 0)
    old = [gpu for gpu in gpus or _DEFAULT_GPUS if int(gpu.removeprefix("sm")) < first]
    if not old:
        return
    others = [f for f in WEIGHT_FORMATS if all(_FIRST_GPU[f] <= int(gpu[2:]) for gpu in old)]
    given = ", ".join(old) + ("" if gpus else f", which {target} builds for unless told otherwise")
    raise ConfigError(
        f"weight_format: {weight_format} on {target} needs GPUs from sm{first} on, got {given}; "
        f"{' and '.join(others) or 'no weight_format'} can there"
    )
