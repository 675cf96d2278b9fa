"""[shell] The hook that the settings name: found and imported once, before the server listens."""

from __future__ import annotations

from importlib import import_module

from tidelog.channels import Hook
from tidelog.errors import BadInput


def load(named: str | None) -> Hook | None:
    """The callable `module:function`; BadInput where there is none. None where none is named."""
    if not named:
        return None
    module, _, rest = named.partition(":")
    if not module or not rest:
        raise BadInput(f"hook is {named!r}, it must be module:function; the server was not started")
    try:
        found: object = import_module(module)
    except Exception as error:  # somebody else's module: whatever keeps it from being imported is told
        raise BadInput(
            f"hook {named!r}: {module} cannot be imported ({type(error).__name__}: {error}); the server was not "
            "started, put it where Python finds it"
        ) from error
    for name in rest.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise BadInput(f"hook {named!r}: {module} has no callable {rest}; the server was not started")
    return found
