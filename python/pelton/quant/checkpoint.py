"""The quantization of one checkpoint in this process: the scheme of each layer, and the method that computes with it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection

from .. import _library, build_info, guard
from ..errors import CheckpointError, MissingFeature, UnsupportedError
from . import awq, compressed_tensors, gptq
from .canonical import Scheme
from .layout import Parser
from .methods import METHODS, Choice, Method, Target, choose
from .settings import QuantizationConfig

__all__ = ["PARSERS", "Quantization", "built_features", "check_unquantized"]

logger = logging.getLogger(__name__)

PARSERS: dict[str, Parser] = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors}  # type: ignore[dict-item]
_MARKS = tuple(sorted({parser.MARK for parser in PARSERS.values()}))
#: an operator of each feature, by which a library without build info is judged
_OPERATORS = {
    "awq": ("awq_gemm", "quant_linear"),
    "gptq": ("gptq_gemm", "quant_linear"),
    "marlin": ("marlin_gemm",),
}


def built_features() -> frozenset[str]:
    """The features of the loaded library: what the build info says, else what operators there are."""
    if build_info.path is not None and not _library.overridden():
        return frozenset(name for name, on in build_info.features.items() if on)
    library = _library.operators()
    return frozenset(
        feature for feature, names in _OPERATORS.items() if any(hasattr(library, name) for name in names)
    )


class Quantization:
    """Asked by linear layers when they are made, before memory is taken.

    Args:
        config: what config.json says.
        names: of the checkpoint's tensors; None: there is no file, and the config alone decides.
        target: what computes.
        flag: `quantization=` of the engine.

    Raises:
        MissingFeature: the build lacks what the format needs.
        CheckpointError: tensors of another format are in the file.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        names: Collection[str] | None,
        target: Target,
        flag: str | None = None,
    ) -> None:
        self.config = config
        self.parser = PARSERS[config.format]
        self.target = target
        self._names = names
        self._flag = flag
        for mark in _MARKS:
            if names is not None and mark != self.parser.MARK:
                other = next((name for name in names if name.endswith(f".{mark}")), None)
                if other is not None:
                    raise CheckpointError(
                        f"{config.source}: quant_method is {config.format!r}, but the file has {other!r}, a tensor of "
                        "another method; a mix of methods is not supported"
                    )

    def has(self, name: str) -> bool:
        """Whether the file has this tensor; True when there is no file."""
        return self._names is None or name in self._names

    def has_more(self, name: str) -> bool:
        """Whether the file has this tensor, which the model need not have."""
        return self._names is not None and name in self._names

    def scheme(self, name: str) -> Scheme | None:
        """How the linear layer `name` is quantized; None: it is not.

        Raises:
            CheckpointError: config and file contradict each other.
        """
        rule = self.config.rule(name)
        wanted = rule.scheme if rule else None
        if self._names is None:
            return wanted
        packed, plain = f"{name}.{self.parser.MARK}", f"{name}.weight"
        if packed in self._names:
            if plain in self._names:
                raise CheckpointError(
                    f"{self.config.source}: the file has both {packed!r} and {plain!r}; expected one of them"
                )
            scheme = None if self.config.complete else self.config.quantized(name)
            if (wanted or scheme) is None:
                why = f"{rule.said_by} leaves it unquantized" if rule else "no group of the config targets it"
                raise CheckpointError(f"{self.config.source}: the file has {packed!r}, but {why}")
            return wanted or scheme
        if wanted is not None and plain in self._names:
            if self.config.complete or (rule is not None and rule.kind == "exact"):
                said_by = rule.said_by if rule else "the config"
                raise CheckpointError(
                    f"{self.config.source}: {said_by} says that {name!r} is quantized, but the file has {plain!r} and "
                    f"no {packed!r}"
                )
            logger.info("%s is not quantized in the file", name)
            return None
        return wanted

    def method(self, name: str, scheme: Scheme, in_features: int, out_features: int) -> type[Method]:
        """What computes with the layer `name`.

        Raises:
            MissingFeature: a feature that this build lacks.
            UnsupportedError: nothing does.
        """
        choice = choose(self.target, scheme, in_features, out_features)
        where = f"{self.config.source}: {name} ({scheme.describe()}, {in_features} to {out_features})"
        if not isinstance(choice, Choice):
            if not choice.feature:
                raise UnsupportedError(f"{where}: {choice.reason}")
            raise missing_feature(f"{where}: {choice.reason}", choice.feature)
        if self._flag == "marlin" and choice.method != "marlin":
            self._refuse_marlin(where, choice)
        return METHODS[choice.method]

    def _refuse_marlin(self, where: str, choice: Choice) -> None:
        if self.target.backend == "cuda" and "marlin" not in self.target.features:
            raise missing_feature(f"{where}: quantization='marlin' needs the feature marlin", "marlin")
        why = choice.reason.removeprefix("not marlin: ")
        if self.target.backend != "cuda":
            why = f"marlin is for CUDA, and this is a build for {self.target.backend}"
        raise UnsupportedError(f"{where}: quantization='marlin' cannot be had: {why}; leave quantization out")


def check_unquantized(names: Collection[str], source: str) -> None:
    """Refuse packed weights of which the config says nothing. Raises CheckpointError."""
    packed = next((name for name in names if name.endswith(tuple(f".{mark}" for mark in _MARKS))), None)
    if packed is not None:
        raise CheckpointError(
            f"{source}: the file has packed weights ({packed!r}), but there is no quantization_config; copy it from "
            "where the checkpoint was made"
        )


def missing_feature(what: str, feature: str) -> MissingFeature:
    """The error for a feature that the loaded library lacks, with the commands that help."""
    if _library.overridden() or build_info.path is None:
        return MissingFeature(
            f"{what}, and the library that PELTON_LIBRARY names does not have it",
            feature=feature,
            profile="",
            install=f"build it with the sources of the feature {feature} (kernels/kernels.toml lists them)",
        )
    profile, label = build_info.profile, build_info.label
    install = f"pip install --force-reinstall --no-deps . -C profile={profile} -C feature.{feature}=on   (in the source tree)"
    if f"no{feature}" in label.split("."):  # switched off: the wheel that everybody gets has it
        url = f"{guard.index_address().rstrip('/') or 'INDEX'}/p/{profile}/simple/"
        note = "" if guard.index_address() else "INDEX: the address that pelton was installed from; "
        command = f"pip install --force-reinstall --no-deps --index-url {shlex.quote(url)} pelton"
        install = f"{command}   ({note}the usual wheel of this profile has it), or {install}"
    return MissingFeature(
        f"{what}, and this build of pelton (profile {profile}, label {label}) does not have it",
        feature=feature,
        profile=profile,
        install=install,
    )
