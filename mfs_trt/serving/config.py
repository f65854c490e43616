"""ServeConfig: what one worker model serves and how, from `serve.json` and the `parameters` of
`config.pbtxt`.

`config.pbtxt` wins where both set a value, because Triton server can override it at load time.
There an empty value or an unfilled `${name}` means unset, as in TensorRT-LLM's templates.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mfs_trt.errors import ConfigError
from mfs_trt.scheduler.tier_policy import EXPLICIT, TIER_POLICIES

SERVE_CONFIG_NAME = "serve.json"
STOPPING_NAME = "stopping"  # file beside it: the server is about to stop, no more tickets

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "engine": (str,),
    "max_queue_size": (int,),
    "cancel_poll_s": (int, float),
    "ticket_period_s": (int, float),
    "metrics_period_s": (int, float),
    "drain_timeout_s": (int, float),
    "max_step_ms": (int, float),
    "tier_policy": (str,),
    "excludes_input": (bool,),
    "ignored_parameters": (list,),
}


@dataclass(frozen=True)
class ServeConfig:
    """Settings of one worker. Raises `ConfigError` naming the field, what was expected and what
    came.
    """

    engine: str  # engine folder, absolute or relative to the version folder that holds serve.json
    max_queue_size: int = 1024  # requests that may wait; one more is refused
    cancel_poll_s: float = 0.1  # how often a running request's client is asked after
    ticket_period_s: float = 0.5  # the same for requests that came through an ensemble
    metrics_period_s: float = 1.0
    drain_timeout_s: float = 20.0  # how long unloading waits for running requests
    max_step_ms: float = 0.0  # longest step that prompts may cause beside decodes; 0: by their own
    tier_policy: str = EXPLICIT  # of requests that name neither a policy nor a tier
    excludes_input: bool = False  # for requests that do not set exclude_input_in_output
    ignored_parameters: tuple[str, ...] = ()  # patterns of request parameters to ignore (fnmatch)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignored_parameters", tuple(self.ignored_parameters))
        if self.max_queue_size < 1:
            raise ConfigError(f"max_queue_size: expected at least 1, got {self.max_queue_size}")
        if self.max_step_ms < 0:
            raise ConfigError(f"max_step_ms: expected at least 0, got {self.max_step_ms}")
        if self.tier_policy not in TIER_POLICIES:
            raise ConfigError(
                f"tier_policy: expected one of {', '.join(TIER_POLICIES)}, got {self.tier_policy!r}"
            )
        for name in ("cancel_poll_s", "ticket_period_s", "metrics_period_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected above 0, got {getattr(self, name)}")


def load_serve_config(
    version_folder: Path | str, parameters: Mapping[str, str]
) -> tuple[ServeConfig, tuple[str, ...]]:
    """Read `serve.json` in a model's version folder and lay the config.pbtxt `parameters` over it.

    Returns the config, its engine folder absolute and existing, and the names of set parameters
    without effect here. Raises `ConfigError` in one line that names file and key.
    """
    folder = Path(version_folder)
    path = folder / SERVE_CONFIG_NAME
    values = _read_json(path) if path.exists() else {}
    from_parameters, ignored = _read_parameters(parameters)
    values.update(from_parameters)
    source = "config.pbtxt: gpt_model_path" if "engine" in from_parameters else f"{path}: engine"
    for key, value in values.items():
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            raise ConfigError(f"{path}: {key}: expected a value, got the unfilled {value!r}")
    if not values.get("engine"):
        raise ConfigError(
            f"{path}: engine: expected an engine folder, got none "
            "(nor gpt_model_path in config.pbtxt)"
        )
    try:
        config = ServeConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    engine = (folder / config.engine).absolute()
    if not engine.is_dir():
        raise ConfigError(f"{source}: no such folder: {engine}")
    return replace(config, engine=str(engine)), ignored


def write_serve_config(path: Path, config: ServeConfig) -> None:
    data = {field.name: getattr(config, field.name) for field in fields(config)}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    unknown = sorted(set(values) - set(_FIELD_TYPES))
    if unknown:
        raise ConfigError(
            f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(_FIELD_TYPES)}"
        )
    for key, value in values.items():
        expected = _FIELD_TYPES[key]
        unfilled = isinstance(value, str) and _PLACEHOLDER.search(value)
        if not unfilled and (
            not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected)
        ):
            names = " or ".join(t.__name__ for t in expected)
            raise ConfigError(f"{path}: {key}: expected {names}, got {value!r}")
    return values


def _milliseconds(text: str) -> float:
    return float(text) / 1000


def _boolean(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


_HONOURED: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "gpt_model_path": ("engine", str, "a folder"),
    "max_queue_size": ("max_queue_size", int, "an integer"),
    "cancellation_check_period_ms": ("cancel_poll_s", _milliseconds, "milliseconds"),
    "stats_check_period_ms": ("metrics_period_s", _milliseconds, "milliseconds"),
    "exclude_input_in_output": ("excludes_input", _boolean, "true or false"),
}


def _read_parameters(parameters: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values of honoured parameters by field name, and the names of the set ones that have no
    effect.
    """
    values: dict[str, Any] = {}
    ignored = []
    for key, text in parameters.items():
        if not text or _PLACEHOLDER.fullmatch(text.strip()):
            continue
        if key not in _HONOURED:
            ignored.append(key)
            continue
        field, convert, expected = _HONOURED[key]
        try:
            values[field] = convert(text)
        except ValueError:
            raise ConfigError(
                f"config.pbtxt: parameters: {key}: expected {expected}, got {text!r}"
            ) from None
    return values, tuple(sorted(ignored))
