"""The package that is installed holds what the folders hold."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def test_every_package_is_listed() -> None:
    found = set()
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    assert sorted(found) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_every_module_is_in_a_package() -> None:
    for folder in FOLDERS.values():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_packages_are_imported_under_one_name() -> None:
    for name, folder in FOLDERS.items():
        file = import_module(name).__file__
        assert file is not None
        assert Path(file).is_relative_to(ROOT / folder)


def test_types_and_licence_are_shipped() -> None:
    shipped = PROJECT["tool"]["setuptools"]["package-data"]
    assert shipped == {"tinyedge": ["py.typed"], "tinyedge.web": ["runtime/*.js", "demo/*"]}
    assert (ROOT / "tinyedge" / "py.typed").exists()
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
