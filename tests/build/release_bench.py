"""A workshop that makes small wheels instead of compiling, and can be killed: `python -m release_bench TREE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import wheel_factory
from pelton_build import audit
from pelton_build.cmake import source_digest
from pelton_build.index import build_index
from pelton_build.plan import Plan
from pelton_build.release import Item, Options, make_release
from pelton_build.variants import make_variant
from wheel_factory import make_wheel

ARCHS = {"cpu-avx2": "x86-64-v3", "cpu-avx512": "x86-64-v4"}


def small_wheel(
    root: Path, plan: Plan, place: Path, variant: Mapping[str, object] | None = None, **info: object
) -> Path:
    """A wheel with the plan's name, of the sources in `root`."""
    parts = wheel_factory.labelled(plan.profile, "x", archs=(ARCHS.get(plan.profile, "x86-64-v3"),))
    facts = {
        "version": plan.wheel_version,
        "label": plan.label,
        "size_budget": plan.size_budget,
        "source_digest": source_digest(root),
        "plan": {**wheel_factory.INFO["plan"], "variant": variant or {}},
        **info,
    }
    return make_wheel(
        place.parent, parts.but(version=plan.wheel_version, file_name=place.name).with_info(**facts)
    )


class Bench:
    """The workshop. `slow` is the profile whose build says that it has begun, and then takes a minute."""

    def __init__(self, root: Path, slow: str = "", **info: object) -> None:
        self.root, self.slow, self.info = root, slow, info
        self.done: list[str] = []

    def place_of(self, plan: Plan) -> Path:
        return self.root / "dist" / (plan.profile if plan.label else "simple") / plan.wheel_name

    def build(self, item: Item) -> None:
        assert isinstance(item.plan, Plan)
        if item.plan.profile == self.slow:
            (self.root / "begun").touch()
            time.sleep(60)
        self.done.append(f"build {item.title}")
        place = self.place_of(item.plan)
        made = small_wheel(self.root, item.plan, self.root / "build" / "made" / place.name, **self.info)
        report = audit.audit_wheel(made, only={"size"})
        if not report.ok:
            raise audit.AuditError("; ".join(map(str, report.findings)))
        place.parent.mkdir(parents=True, exist_ok=True)
        made.replace(place)

    def make_variants(self, items: Sequence[Item], wheels: Sequence[Path]) -> list[Path]:
        made = []
        for item in items[:-1]:
            assert isinstance(item.plan, Plan)
            plan = replace(item.plan, label="", wheel_version=item.plan.wheel_version.partition("+")[0])
            place = self.root / "build" / plan.profile / wheels[-1].name
            plain = small_wheel(self.root, plan, place, variant=plan.variant)
            made.append(make_variant(plain, wheels[-1].parent))
        return made

    def make_sdist(self) -> Path:
        made = self.root / "dist" / "sdist" / "pelton.tar.gz"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("sources")
        return made

    def make_index(self, wheels: Sequence[Path], site: Path) -> None:
        self.done.append("index")
        build_index(wheels, site, baseline="cpu-avx2")

    def try_wheels(self, site: Path, items: Sequence[Item]) -> list[str]:
        for item in items:
            assert (site / item.place / "pelton" / "index.json").is_file()
        return ["computes" for _ in items]

    def rebuild(self, item: Item, wheel: Path) -> str:
        self.done.append(f"rebuild {item.title}")
        return "somebody else"


if __name__ == "__main__":
    tree = Path(sys.argv[1])
    make_release(tree, Options(tree / "site", dry_run=True), Bench(tree, slow="cpu-avx512"))
