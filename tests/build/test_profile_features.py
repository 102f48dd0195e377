"""The features of the project's own profiles: switched by the variables that people know, seen in plan and label."""

from __future__ import annotations

import pytest

import plan_cases
from pelton_build.errors import PlanError
from pelton_build.plan import Plan
from pelton_build.profile import profile_names
from pelton_build.resolve import resolve
from pelton_build.settings import read_choices
from plan_cases import FULL

TABLE = plan_cases.real_table()
PROFILES = {name: plan_cases.real_profile(name) for name in profile_names(plan_cases.ROOT)}
ON = [(name, feature) for name, profile in PROFILES.items() for feature, on in profile.features.items() if on]
OFF = [
    (name, feature)
    for name, profile in PROFILES.items()
    for feature, on in profile.features.items()
    if not on
]


def plan_of(profile: str, environ: dict[str, str]) -> Plan:
    choices = read_choices({"profile": profile}, environ, TABLE)
    return resolve(PROFILES[profile], choices, TABLE, FULL, "0.1.0")


def sources_of(plan: Plan) -> dict[str, str]:
    return {source.path: source.family for source in plan.sources}


def families_of(features: set[str], backend: str) -> set[str]:
    """The families that these features alone bring."""
    return {
        family.name
        for family in TABLE.families
        if family.features and backend in family.device and set(family.features) <= features
    }


@pytest.mark.parametrize(("profile", "feature"), ON)
def test_switched_off(profile: str, feature: str) -> None:
    usual, plan = plan_of(profile, {}), plan_of(profile, {TABLE.features[feature].environment: "0"})
    mark = f"no{feature.replace('-', '')}"
    assert plan.label.split(".")[-1] == mark
    assert plan.label.removesuffix(f".{mark}") == usual.label
    assert plan.public()["features"] == {**usual.public()["features"], feature: False}
    lost = {family for path, family in sources_of(usual).items() if path not in sources_of(plan)}
    others = {name for name, on in PROFILES[profile].features.items() if on and name != feature}
    backend = PROFILES[profile].target.backend
    left_out = {
        family.name
        for family in TABLE.families
        if feature in family.features and backend in family.device and not others & set(family.features)
    }
    assert lost == left_out


@pytest.mark.parametrize("profile", sorted({name for name, _ in ON}))
def test_all_switched_off(profile: str) -> None:
    features = {feature for name, feature in ON if name == profile}
    plan = plan_of(profile, {TABLE.features[feature].environment: "0" for feature in features})
    for feature in features:
        assert f"no{feature.replace('-', '')}" in plan.label.split(".")
    backend = PROFILES[profile].target.backend
    assert not families_of(features, backend) & set(sources_of(plan).values())
    assert families_of(features, backend) <= set(sources_of(plan_of(profile, {})).values())


@pytest.mark.parametrize(("profile", "feature"), OFF)
def test_switched_on(profile: str, feature: str) -> None:
    """It is in, and in the label; or it is refused by name, because this backend cannot have it."""
    environ = {TABLE.features[feature].environment: "1"}
    if PROFILES[profile].target.backend not in TABLE.features[feature].backends:
        with pytest.raises(PlanError, match=f"feature '{feature}' is on .* but it is a feature of"):
            plan_of(profile, environ)
        return
    try:
        plan = plan_of(profile, environ)
    except PlanError as error:
        assert "no family of kernels.toml implements it" in str(error)
        return
    assert feature.replace("-", "") in plan.label.split(".")
    assert plan.public()["features"][feature] is True


def test_the_baseline_runs_quantized_checkpoints() -> None:
    """What a plain installation has."""
    assert {"awq", "gptq"} <= {feature for name, feature in ON if name == "cpu-avx2"}
