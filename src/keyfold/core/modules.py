"""Modules that users write and name in the settings: handlers, hooks."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from keyfold.core.errors import SettingsWrong


def load(where: str, place: str) -> ModuleType:
    """A module by its name, or by its file (ending in .py); `place` is the setting that names it."""
    try:
        if not where.endswith(".py"):
            _import_from(Path.cwd())
            return importlib.import_module(where)
        path = Path(where).resolve()
        _import_from(path.parent)
        spec = importlib.util.spec_from_file_location(f"keyfold_{place.replace('.', '_')}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        what = place.rpartition(".")[2]
        raise SettingsWrong(f"the {what} cannot be loaded: {type(error).__name__}: {error}", place=place) from error


def _import_from(folder: Path) -> None:
    """Such a module, and what lies beside it, is found as if Python had been started there."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
