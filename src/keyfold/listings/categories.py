"""The categories of offers: a JSON Schema for each, versioned; what is written is checked against the newest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
from msgspec import Struct

from keyfold.core.errors import BadInput, SettingsWrong

EXAMPLES = Path(__file__).parent / "examples"
ERRORS_SHOWN_MAX = 20


class ContentRefused(BadInput):
    """The offer does not meet the schema of its category"""

    slug = "content-refused"
    status = 422


class Category(Struct, frozen=True):
    """One version of a category."""

    name: str
    version: int
    schema: Mapping[str, Any]
    checks: Any  # what jsonschema_rs has compiled

    def must_hold(self, content: Mapping[str, Any]) -> None:
        """Refuse content that breaks the schema, naming every field that does."""
        if self.checks.is_valid(content):
            return
        told = [
            (".".join(["content", *map(str, each.instance_path)]), each.message)
            for each in self.checks.iter_errors(content)
        ]
        shown = "; ".join(f"{place}: {message[:200]}" for place, message in told[:ERRORS_SHOWN_MAX])
        more = f"; and {len(told) - ERRORS_SHOWN_MAX} more" if len(told) > ERRORS_SHOWN_MAX else ""
        raise ContentRefused(f"{shown}{more}", place=told[0][0])


class Categories:
    """Every category of a folder, `CATEGORY/VERSION.json`."""

    def __init__(self, folder: str = "") -> None:
        root = Path(folder) if folder else EXAMPLES
        if not root.is_dir():
            raise SettingsWrong(f"listings.categories: there is no folder {root}")
        self._versions: dict[str, dict[int, Category]] = {}
        for path in sorted(root.glob("*/*.json")):
            self._versions.setdefault(path.parent.name, {})[_number(path)] = _read(path)
        if not self._versions:
            raise SettingsWrong(f"listings.categories: {root} has no CATEGORY/VERSION.json")

    @property
    def names(self) -> list[str]:
        return sorted(self._versions)

    def newest(self, name: str) -> Category:
        """What new content of a category is checked against."""
        versions = self._versions.get(name)
        if versions is None:
            raise BadInput(
                f"there is no category {name[:100]!r}", place="category", hint=f"There are {', '.join(self.names)}"
            )
        return versions[max(versions)]


def _number(path: Path) -> int:
    if not path.stem.isdecimal() or int(path.stem) < 1:
        raise SettingsWrong(f"listings.categories: {path} is not named after a version, as 3.json is")
    return int(path.stem)


def _read(path: Path) -> Category:
    try:
        schema = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        # No reference is ever looked up outside the file.
        checks = jsonschema_rs.Draft202012Validator(schema, retriever=_refuse, validate_formats=True, mask="the value")
    except (OSError, msgspec.DecodeError, ValueError, jsonschema_rs.ValidationError) as error:
        raise SettingsWrong(f"listings.categories: {path}: {error}") from error
    return Category(path.parent.name, _number(path), schema, checks)


def _refuse(uri: str) -> Any:
    raise ValueError(f"a schema names nothing outside itself, as {uri}")
