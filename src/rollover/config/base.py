"""The base of every configuration table: unknown keys are errors, values are not coerced from the wrong type."""

from pydantic import BaseModel, ConfigDict

# Validation context of values that are not settled yet: options that a later layer switches off may still be there, so
# nothing is refused. load_config refuses by itself, and tells which layer set what.
UNSETTLED = object()


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names file, key and fix."""


class Table(BaseModel):
    """Checked where it is made, and frozen. pydantic's `model_copy(update=...)` and `model_construct` check nothing: of
    values that may be wrong make a new one."""

    model_config = ConfigDict(extra="forbid", strict=False, validate_default=False, frozen=True)
