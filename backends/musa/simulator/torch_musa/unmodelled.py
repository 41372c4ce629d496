"""Names of torch_musa 2.7.1 that the simulator does not model: they have their signature and raise
NotImplementedError."""

import inspect
import json
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "api" / "torch_musa-2.7.1.json"


def present(module):
    """Add to `module` the names of the table that it lacks."""
    for name, entry in json.loads(TABLE.read_text())["torch.musa"].items():
        if not hasattr(module, name):
            made = _function(name, entry) if isinstance(entry, str) else type(name, (), {"__new__": _refusing(name)})
            setattr(module, name, made)
        if isinstance(entry, dict):
            owner = getattr(module, name)
            for member, signature in entry.items():
                if not hasattr(owner, member):
                    setattr(owner, member, _method(f"{name}.{member}", signature))


def _refusing(name):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"torch_musa.{name} is not modelled by the simulator")

    return refuse


def _function(name, signature):
    function = _refusing(name)
    function.__name__ = name
    function.__signature__ = signature_of(signature)
    return function


def _method(name, signature):
    if signature == "property":
        return property(_refusing(name))
    function = _refusing(name)
    parameters = signature_of(signature).parameters.values()
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function.__signature__ = inspect.Signature([itself, *parameters])
    return function


def signature_of(text):
    """The inspect.Signature of a table entry such as "(device=None)"."""
    scope = {}
    exec(f"def f{text}: ...", scope)
    return inspect.signature(scope["f"])
