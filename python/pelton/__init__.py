"""Pelton: an inference engine for large language models.

>>> from pelton import LLM, SamplingParams
>>> llm = LLM("path/to/model")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

Importing the package imports neither torch nor the compiled library; the names below do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton import _editable, _environment

if TYPE_CHECKING:
    from pelton import build_info
    from pelton.engine import Engine
    from pelton.errors import PeltonError
    from pelton.llm import LLM
    from pelton.outputs import CompletionOutput, Logprob, RequestOutput
    from pelton.sampling import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "PeltonError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "build_info",
]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "Engine": "engine",
    "Logprob": "outputs",
    "PeltonError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling",
    "__version__": "build_info",
    "build_info": "build_info",
}

_environment.warn()
_editable.rebuild()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{home}")
    if name == home:
        return module
    value = getattr(module, "version" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
