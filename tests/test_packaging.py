"""What packages nerfturbo for others says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from nerfturbo.cli.train import TrainArgs

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(requirements: list[str]) -> set[str]:
    """`torch>=2.11` and conda's `pytorch >=2.11` alike, without spaces."""
    return {re.sub(r"^pytorch", "torch", one).replace(" ", "") for one in requirements}


def test_the_readme_names_every_extra() -> None:
    table = re.findall(r"^\| (`.+?`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {extra for cell in table for extra in re.findall(r"`([a-z-]+)`", cell)}
    assert named == set(PROJECT["optional-dependencies"]) - {"test", "dev", "docs"}


def test_each_framework_that_lists_us_has_an_extra() -> None:
    frameworks = {group.partition(".")[0] for group in PROJECT["entry-points"]}
    assert frameworks == {"nerfstudio", "nerfbaselines"}
    assert all(PROJECT["optional-dependencies"][one][0].startswith(f"{one}>=") for one in frameworks)


def test_the_conda_recipe_is_the_project() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/meta.yaml").read_text())
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    run = named(recipe["requirements"]["run"])
    assert run == named(PROJECT["dependencies"]) | {f"python{PROJECT['requires-python']}"}
    assert recipe["build"]["entry_points"] == [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], cited["version"]) == (PROJECT["name"], PROJECT["version"])
    assert cited["license"] == PROJECT["license"]


def test_the_image_runs_as_nobody_special_with_extras_that_exist() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    extras = re.search(r'"\.\[([a-z,]+)\]"', "\n".join(lines))
    assert extras is not None and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    users = [line for line in lines if line.startswith("USER ")]
    assert users and users[-1] != "USER root" and lines.index(users[-1]) < lines.index('ENTRYPOINT ["nerfturbo"]')
    assert f"EXPOSE {TrainArgs.viewer_port}" in lines


def test_the_workflow_runs_what_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    steps = [step.get("run") for job in jobs.values() for step in job["steps"]]
    assert "bash .ci/run" in steps and "make docs" in steps
