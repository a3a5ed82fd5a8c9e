"""What SGLang and transformers work out anew for every engine, and never differently: a seventh of the time of a build.

SGLang asks msgspec for the fields of its ServerArgs several times, which evaluates each annotation; transformers writes down
every configuration that it reads, for a log that is off.
"""

from typing import Any

import msgspec.structs


def install(shims: list[str]) -> None:
    """After transformers is imported."""
    _remember_fields(shims)
    _leave_configurations_unwritten(shims)


def _remember_fields(shims: list[str]) -> None:
    work_out = msgspec.structs.fields
    known: dict[type, tuple[msgspec.structs.FieldInfo, ...]] = {}

    def fields(type_or_instance: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
        if not isinstance(type_or_instance, type):
            return work_out(type_or_instance)
        if type_or_instance not in known:
            known[type_or_instance] = work_out(type_or_instance)
        return known[type_or_instance]

    msgspec.structs.fields = fields
    shims.append("msgspec.structs.fields: what it finds is remembered")


def _leave_configurations_unwritten(shims: list[str]) -> None:
    from transformers import configuration_utils

    for name in ("PreTrainedConfig", "PretrainedConfig"):  # before transformers 5
        if hasattr(configuration_utils, name):
            getattr(configuration_utils, name).__repr__ = _named
            shims.append(f"transformers' {name}.__repr__: the class alone")
            return


def _named(configuration: object) -> str:
    return f"{type(configuration).__name__} of {getattr(configuration, 'model_type', 'no type')}"
